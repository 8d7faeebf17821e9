"""Draw the plots in benchmarks/results from the figures beside them, without measuring.

python benchmarks/_redraw.py
"""

import json
from pathlib import Path

from _side_by_side import read_report

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    for file in sorted(RESULTS.glob("*.json")):
        read_report(json.loads(file.read_text())).plot(file.with_suffix(".png"))


if __name__ == "__main__":
    main()
