"""Pictures: what turns them into the rows that workers read."""
