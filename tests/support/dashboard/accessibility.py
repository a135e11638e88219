"""What a reader without a mouse, with bad eyes or with a screen reader needs, looked for on the page as it is drawn."""

import shutil
import subprocess
from pathlib import Path

CHECKS = Path(__file__).with_suffix(".js").read_text()
SERIOUS = """
async () => (await axe.run(document, { resultTypes: ["violations"] })).violations
  .filter((one) => ["serious", "critical"].includes(one.impact))
  .map((one) => `${one.id}: ${one.nodes.map((node) => node.html.slice(0, 120))}`)
"""


def find_axe():
    """axe-core's script where npm has installed it, beside the repository or for all; None where not."""
    roots = [Path(__file__).resolve().parents[3] / "node_modules"]
    npm = shutil.which("npm")
    if npm is not None:
        done = subprocess.run([npm, "root", "-g"], capture_output=True, text=True, check=False, timeout=60)
        roots.append(Path(done.stdout.strip()))
    return next(
        (root / "axe-core" / "axe.min.js" for root in roots if (root / "axe-core" / "axe.min.js").is_file()), None
    )
