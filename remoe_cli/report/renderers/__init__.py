"""How a report is shown. A new form is one file here and one line in RENDERERS."""

from remoe_cli.report.renderers.markdown import markdown
from remoe_cli.report.renderers.terminal import terminal

RENDERERS = {"terminal": terminal, "markdown": markdown}
