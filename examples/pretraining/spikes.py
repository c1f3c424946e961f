"""Loss spikes: steps whose training loss leaps out of what the steps before it had."""

import math
import statistics
from collections.abc import Sequence

WINDOW, FEWEST = 50, 20
DEVIATIONS, NATS = 5.0, 0.1


def loss_spikes(losses: Sequence[float]) -> list[int]:
    """Return the places in `losses`, those of all steps in order, at which a spike begins.

    A loss is high when it is above `median + max(5 * 1.4826 MAD, 0.1 nats)` of the last 50 finite
    losses before it, or not finite itself. MAD is the median distance from the median, and 1.4826
    MAD the standard deviation where losses are normal; neither moves much when a few of the 50 are
    spikes themselves. A spike begins with a high loss after one that is not, however long it
    lasts. A loss that stays high is thus one spike, and after half a window no longer high. The
    first losses, before there are 20, are no spikes.

    Early in a run the median lags behind the falling loss: spikes there have to be larger.
    """
    begins, before, was_high = [], [], False
    for place, loss in enumerate(losses):
        high = len(before) >= FEWEST and not loss <= _limit(before[-WINDOW:])
        if high and not was_high:
            begins.append(place)
        if math.isfinite(loss):
            before.append(loss)
        was_high = high
    return begins


def _limit(losses: Sequence[float]) -> float:
    median = statistics.median(losses)
    deviation = 1.4826 * statistics.median(abs(loss - median) for loss in losses)
    return median + max(DEVIATIONS * deviation, NATS)
