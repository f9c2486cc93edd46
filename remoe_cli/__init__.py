"""remoe: make Mixture-of-Experts models cacheable by tuning only their router gates."""

__version__ = "0.1.0"


def load(base: str, delta: str, **kwargs):
    """The base model with the delta's gates in place: `remoe_cli.load("deepseek-ai/DeepSeek-V2-Lite", "me/my-delta")`.

    base: Hub id (`@revision`), local folder or "demo"; delta: local folder, run folder or Hub id. Keyword arguments
    go to transformers' `from_pretrained`. Raises RemoeError when the delta does not belong to the base.
    """
    from remoe_cli.apply import load as _load

    return _load(base, delta, **kwargs)
