"""The model card of a pushed delta, written from its report."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, TYPE_CHECKING

import yaml

from remoe_cli.recipe import is_own, prompts_of, Recipe
from remoe_cli.report.charts import HEADLINE
from remoe_cli.report.renderers.markdown import markdown
from remoe_cli.report.verdict import verdict

if TYPE_CHECKING:
    from remoe_cli.delta import Delta


def card(
    delta: "Delta",
    recipe: Recipe,
    facts: dict[str, Any],
    report: dict[str, Any] | None,
    *,
    name: str,
    licence: Mapping[str, str],
    adapter: bool = False,
    ggufs: Sequence[str] = (),
) -> str:
    """README.md: metadata block, results with their conditions, how to use, licence, limits.

    facts: the run's run.json; name: what the delta is found by; licence: the base's (`hub.licence`), empty if unknown.
    adapter, ggufs: the PEFT adapter and the GGUF files (all parts) that lie beside the delta.
    """
    header: dict[str, Any] = {
        "library_name": "remoe",
        "tags": [
            *("remoe", "mixture-of-experts", "expert-cache", "router", delta.model_type),
            *(["peft"] if adapter else []),
            *(["gguf"] if ggufs else []),
        ],
        **({"base_model": delta.base, "base_model_relation": "adapter"} if delta.commit else {}),
        **licence,
    }
    pinned = delta.base + (f"@{delta.commit}" if delta.commit else "")
    layers = len({gate.split(".layers.")[-1].split(".")[0] for gate in delta.tensors})
    size = sum(t.numel() * t.element_size() for t in delta.tensors.values()) / 1e6
    results = (
        f"{verdict(report)}\n\n![hit rate by cache size, and its price in perplexity]({HEADLINE})\n\n{markdown(report)}"
        if report is not None
        else "Not evaluated yet: `remoe eval --cache 6` writes the figures here.\n"
    )
    return f"""---
{yaml.safe_dump(header, sort_keys=False, allow_unicode=True).strip()}
---

# Cacheable router gates for {delta.base}

A router delta: the gates of {layers} MoE layers ({size:.2f} MB), tuned with the `{recipe.name}` recipe so that neighbouring
tokens use the same experts more often. {_extent(delta, recipe)} When only some experts fit in fast
memory, fewer of them have to be loaded for each token.

Base: `{pinned}` ({delta.model_type}).{_changed(delta)}

## Results

{results}
## Use

    pip install remoe-cli

    import remoe_cli
    model = remoe_cli.load("{pinned}", "{name}")

or write a patched checkpoint that every loader can read:

    remoe apply {name} {pinned} --out patched

or look at the files first:

    remoe pull {name}

{_adapter(pinned, name) if adapter else ""}{_ggufs(ggufs, name) if ggufs else ""}The delta is refused on any other base or revision: `remoe.json` holds the sha256 of every gate it was made from.

## Licence

{_licence(licence, delta.base)}

## Limits

- Trained on {_texts(recipe.data.source)} for {_steps(recipe, facts)}; gates tuned on one kind of text may help another less.
- Cache figures are for one sequence at a time, with a fresh cache for each request.
- Times depend on the machine; bytes a token do not.

Method: ReMoE (arXiv 2605.27081). The full recipe is in `recipe.yaml`{", all figures in `report.json`" if report is not None else ""}.
"""


def _changed(delta: "Delta") -> str:
    if delta.changed is None:
        return ""
    held = "as they are stored here" if delta.is_float32 else "after the cast to its dtype"
    return f" {100 * delta.changed:.1f} % of the gate elements differ from the base {held}."


def _adapter(pinned: str, name: str) -> str:
    base, _, commit = pinned.partition("@")
    revision = f", revision={commit!r}" if commit else ""
    return f"""With PEFT (the adapter here is the same gates, whole; nothing is approximated):

    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained({base!r}{revision}, dtype="auto")
    model = PeftModel.from_pretrained(model, {name!r})

"""


def _ggufs(ggufs: Sequence[str], name: str) -> str:
    """The first part stands for a split file."""
    firsts = [file for file in ggufs if "-of-" not in file or "-00001-of-" in file]
    runs = "\n".join(f"    llama-cli -m {shlex.quote(file)} -p 'Hello'" for file in firsts)
    from_file = f"FROM ./{firsts[0]}"
    return f"""With llama.cpp, whose gates are in {"these files" if len(ggufs) > 1 else "this file"} already:

    hf download {name} {" ".join(map(shlex.quote, ggufs))} --local-dir .
{runs}

With Ollama: `printf '{from_file}' > Modelfile && ollama create cacheable -f Modelfile && ollama run cacheable`

"""


def _extent(delta: "Delta", recipe: Recipe) -> str:
    """What the delta leaves as it is, and what it has besides gates."""
    unchanged = {
        "gates+lora": "Of the rest of the model, the attention projections are changed too.",
        "full": "The rest of the model is changed too.",
    }.get(recipe.train.scope, "Everything else in the model is unchanged.")
    heads = " `heads.safetensors` holds heads that cache policies read; they decide nothing about what executes."
    return unchanged + (heads if delta.heads else "")


def _licence(licence: Mapping[str, str], base: str) -> str:
    if not licence:
        return f"The licence of {base} could not be read when this card was written; it holds for these gates too."
    stated = licence.get("license_name") or licence.get("license", "")
    link = f" ({licence['license_link']})" if "license_link" in licence else ""
    return f"That of the base, from which the gates derive: {stated}{link}."


def _texts(source: str) -> str:
    """data.source in words: "self:SOURCE" is the base's own text after prompts from SOURCE."""
    return f"what the base wrote after prompts from {prompts_of(source)}" if is_own(source) else source


def _steps(recipe: Recipe, facts: dict[str, Any]) -> str:
    """The steps that were really made."""
    done, planned = facts.get("steps", 0), recipe.train.steps
    return f"{done} steps" if done == planned else f"{done} of {planned} steps ({facts.get('status')})"
