"""A hook of MkDocs: the notebooks as pages, with the outputs stored in them."""

import json
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "notebooks"


def on_files(files: Any, config: Any) -> None:
    """Add a page for each notebook, and the notebook itself."""
    from mkdocs.structure.files import File

    for notebook in sorted(_FOLDER.glob("*.ipynb")):
        uri = f"notebooks/{notebook.name}"
        files.append(File.generated(config, uri, abs_src_path=str(notebook)))
        page = uri.replace(".ipynb", ".md")
        files.append(File.generated(config, page, content=render(notebook)))


def render(notebook: Path) -> str:
    """A notebook, in Markdown."""
    title, *cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    parts = [
        _text(title["source"]),
        f"*[This notebook]({notebook.name}), `docs/notebooks/{notebook.name}` in a "
        "checkout, runs in Jupyter (`pip install jupyterlab`), in VS Code, and in "
        "Colab (File, Upload notebook).*",
    ]
    for cell in cells:
        source = _text(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts += [f"```python\n{source}\n```", *map(_output, cell["outputs"])]
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> str:
    if "text/html" in output.get("data", {}):
        html = _text(output["data"]["text/html"]).strip()
        return f'<div class="notebook-output">\n{html}\n</div>'
    text = _text(output["text"]).rstrip()
    return f"```text\n{text}\n```"


def _text(lines: str | list[str]) -> str:
    """Notebooks keep text in one piece or in lines."""
    return "".join(lines)
