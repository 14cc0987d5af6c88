"""The paper's tables as data: the printed numbers, and the settings of the same runs here."""

from clipcil.paper.tables import PaperResult, PaperTable, Row, Sweep, paper_result, read_table, table_names

__all__ = ["PaperResult", "PaperTable", "Row", "Sweep", "paper_result", "read_table", "table_names"]
