"""The parts of the pre-training example.

Data: `corpus` and `readers` -> `tokenizer` -> `shards` -> `dataset` -> `loader`; `baselines`.
Training: `config` -> `job` (every check, writes nothing) -> `run` -> `train`, with `optimizers`,
`sharding`, `processes`, `checkpoint`, `progress` and `report`.

For a model of your own, put it beside `models/qwen3.py` with its presets and routing rules, and
name it in `models/catalog.py`.
"""
