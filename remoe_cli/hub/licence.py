"""The licence of a base model, as its own card states it."""

from pathlib import Path

from remoe_cli.hub.failures import timeout
from remoe_cli.hub.waiting import ask

_KEYS = ("license", "license_name", "license_link")


def licence_of(base: str, commit: str | None) -> dict[str, str]:
    """license, license_name and license_link from the base's card; empty when it states none or cannot be read.

    base: "org/name" with its commit, or a local folder with none.
    """
    from huggingface_hub import HfApi, ModelCard

    try:
        if commit is not None:
            data = ask(lambda: HfApi().model_info(base, revision=commit, timeout=timeout())).card_data
        else:
            data = ModelCard.load(Path(base) / "README.md", ignore_metadata_errors=True).data
    except Exception:
        return {}
    stated = {key: getattr(data, key, None) for key in _KEYS}
    return {key: value for key, value in stated.items() if isinstance(value, str)}
