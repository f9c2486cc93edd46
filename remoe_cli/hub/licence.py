"""The licence of a base model, as its own card states it."""

from pathlib import Path

from remoe_cli import demo
from remoe_cli.console import note
from remoe_cli.hub.failures import endpoint, timeout, unreachable
from remoe_cli.hub.waiting import ask

_KEYS = ("license", "license_name", "license_link")


def licence_of(base: str, commit: str | None) -> dict[str, str]:
    """license, license_name and license_link from the base's card; empty when it states none or cannot be read.

    base: "demo", "org/name" with its commit, or a local folder with none. Says so on stderr when only the Hub's answer
    is missing, which another time may give.
    """
    from huggingface_hub import HfApi, ModelCard

    folder = demo.PATH if base == "demo" else Path(base).expanduser()
    try:
        if commit is not None:
            data = ask(lambda: HfApi().model_info(base, revision=commit, timeout=timeout())).card_data
        else:
            data = ModelCard.load(folder / "README.md", ignore_metadata_errors=True).data
    except Exception as error:
        if unreachable(error):
            note(
                f"Note: the licence of {base} could not be read ({endpoint()} gives no answer); the same command again, "
                "once it does, puts it on the card"
            )
        return {}
    stated = {key: getattr(data, key, None) for key in _KEYS}
    return {key: value for key, value in stated.items() if isinstance(value, str)}
