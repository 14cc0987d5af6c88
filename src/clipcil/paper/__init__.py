"""The paper's tables as data, with names: what it printed, and how to ask for the same here."""

from clipcil.paper.tables import Claim, PaperTable, Printed, Row, Sweep, printed, read_table, table_names

__all__ = ["Claim", "PaperTable", "Printed", "Row", "Sweep", "printed", "read_table", "table_names"]
