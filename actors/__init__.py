"""Thin Ray shells: plain async classes, decorated at the edge. They carry messages; they decide nothing."""
