"""``python -m farsight`` is the ``farsight`` command."""

from farsight.services.cli import app

app(prog_name="farsight")
