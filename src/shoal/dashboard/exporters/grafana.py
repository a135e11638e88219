"""The Grafana dashboard for the metrics of the endpoint: a file of this package, whose queries name nothing that is not there."""

from pathlib import Path

FILE = Path(__file__).with_name("grafana.json")


def dashboard_text() -> str:
    """The dashboard as JSON, to be imported in Grafana."""
    return FILE.read_text(encoding="utf-8")
