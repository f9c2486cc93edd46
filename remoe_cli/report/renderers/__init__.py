"""How a report is shown: one file for each form."""
