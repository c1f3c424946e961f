"""Symmetry-compatible optimizers for JAX: each parameter block updated by the rule that fits it."""

# What a parameter is: its role, and how its axes form a matrix.
from symoptax._routing import (
    ParamRule,
    Role,
    RoutedLeaf,
    Routing,
    RoutingError,
    apart,
    label_fn,
    mask_fn,
    route,
    view_fn,
)
from symoptax._view import MatrixView

# Rule tables of public model libraries.
from symoptax import routes

# The whole stack, and what it will do.
from symoptax._layerwise import layerwise
from symoptax._report import ReportRow, RoutingReport, routing_report

# How it fares while it trains.
from symoptax._monitor import MonitorState, measure, monitor, monitored

# Whether the claims are true of your model and loss.
from symoptax._audit.audit import audit
from symoptax._audit.report import AuditReport, AuditRow

# On a mesh, and back from a checkpoint.
from symoptax._fingerprint import check_fingerprint, fingerprint
from symoptax._mesh.collectives import Collective, collectives
from symoptax._mesh.layouts import on_mesh
from symoptax._mesh.plan import Plan, PlanRow, plan
from symoptax._mesh.record import MeshWarning
from symoptax._state_shardings import state_shardings

# Optimizers, learning rate first.
from symoptax._optimizers import (
    hybrid_polar_grad_m,
    left_polar_grad_m,
    matrix_optimizer,
    muon,
    polar_grad_m,
    right_polar_grad_m,
    row_norm_m,
    scion,
    ssd,
)

# Bare transformations, to chain by hand.
from symoptax._lazy_momentum import LazyMomentumState, lazy_momentum
from symoptax._matrixwise import matrixwise
from symoptax._momentum import MomentumState, momentum
from symoptax._transforms import (
    center,
    centered_hybrid,
    centered_left_polar,
    centered_right_polar,
    centered_row_norm,
    column_norm,
    hybrid,
    left_polar,
    polar,
    right_polar,
    row_norm,
)
from symoptax._weight_decay import add_weight_decay

# Maps on arrays, and what makes new ones of them.
from symoptax._centering import center_map, centered
from symoptax._hybrid import hybrid_map
from symoptax._map import MatrixMap, dual_norm_scaled, scaled
from symoptax._polar import left_polar_map, polar_map, right_polar_map
from symoptax._row_mask import row_masked
from symoptax._row_norm import column_norm_map, row_norm_map, sign_map
from symoptax._scaling import shape_scale

# The mathematics underneath.
from symoptax._coefficients import TABLES
from symoptax._cost import Cost, cost
from symoptax._minimax import minimax_table
from symoptax._newton_schulz import inverse_sqrt, polar_factor
from symoptax._numerics import BFLOAT16, BFLOAT16_X3, FLOAT32, Numerics

# Symmetries, and how far an update rule is from one.
from symoptax._equivariance import EquivarianceTable, equivariance_error, equivariance_table
from symoptax._symmetry import Group, GroupElement, Symmetry, random_element
