"""How a report is shown. A new form is one file here and one line in RENDERERS."""

from remoe_cli.report.renderers.card import results_markdown
from remoe_cli.report.renderers.terminal import terminal

RENDERERS = {"terminal": terminal, "card": results_markdown}
