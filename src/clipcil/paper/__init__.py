"""The paper's tables as data, with names: what it printed, and how to ask for the same here."""

from clipcil.paper.tables import Claim, PaperResult, PaperTable, Row, Sweep, paper_result, read_table, table_names

__all__ = ["Claim", "PaperResult", "PaperTable", "Row", "Sweep", "paper_result", "read_table", "table_names"]
