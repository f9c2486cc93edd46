"""What is not applicable, shown to fail: when one of these passes, its row in rows.py (and docs/families.md) loses a gap."""

import runpy
from pathlib import Path

import pytest

from conformance.rows import PRESENT, ROWS, TOP_K
from remoe_cli.errors import FamilyError
from remoe_cli.offload import OffloadedDecoder


def gaps(suite: str):
    names = [name for name, row in PRESENT.items() if suite in row.gaps]
    return pytest.mark.parametrize("built", names, indirect=True, ids=str)


def test_every_gap_is_shown():
    assert {suite for row in ROWS.values() for suite in row.gaps} == {"offload"}


@gaps("offload")
def test_experts_that_cannot_be_left_on_disk_are_refused_by_name(built):
    with pytest.raises(FamilyError) as caught:
        OffloadedDecoder(built.checkpoint, TOP_K + 1)
    assert built.model_type in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_the_table_of_the_documentation_is_up_to_date():
    docs = Path(__file__).resolve().parents[2] / "docs"
    page = runpy.run_path(str(docs / "make_families.py"))["page"]()
    assert (docs / "families.md").read_text() == page, "python docs/make_families.py writes it anew"
