"""What a run found: metrics, and the report that holds them. No torch here."""
