"""The site's pages from the repository's files, for MkDocs.

A link in README.md or docs/ leads to a file of the repository, as it does where the repository is
shown. In the site it leads to the page that is made of that file: of Markdown a page of its own, of
an example one of the gallery, of any other file its text.
"""

import ast
import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "BENCHMARKS.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
GALLERY = "examples/index.md"
API = {
    "shardcast": "What a script needs: `shard()`, its options, and the optimizer that it returns.",
    "shardcast.metrics": "What `optimizer.metrics()` measured, for loggers and as a table.",
    "shardcast.checkpoint": "Save, load, resume, import and export.",
    "shardcast.accelerate": "Accelerate.",
    "shardcast.transformers": "The Trainer of transformers.",
    "shardcast.lightning": "Lightning.",
    "shardcast.estimate": "Memory, traffic and time of a job before it starts.",
    "shardcast.testing": "Process groups for unit tests.",
}
CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
TARGET = re.compile(
    r"(?P<before>\]\(|<(?:img|source)\b[^>]*?\b(?:src|srcset)=\"|<a\b[^>]*?\bhref=\")"
    r"(?P<target>[^)\s\"#]+)"
)
WORDS = {
    "ema": "EMA",
    "gan": "GAN",
    "adamw": "AdamW",
    "trl": "TRL",
    "grpo": "GRPO",
    "train": "Train",
}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash", ".sbatch": "bash"}


class Site:
    """The pages that are made so far, by their place in the site."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        for path in sorted((ROOT / "docs").rglob("*.md")):
            self.add_markdown(path, path.relative_to(ROOT / "docs").as_posix())
        for name, page in PAGES.items():
            self.add_markdown(ROOT / name, page)
        self.add_gallery()
        self.texts.update(api_pages())

    def add_markdown(self, path: Path, page: str) -> None:
        self.texts[page] = ""  # its links may come back to it
        parts = CODE.split(path.read_text(encoding="utf-8"))
        for i in range(0, len(parts), 2):  # what is between the code
            parts[i] = TARGET.sub(lambda match: self.relinked(match, path, page), parts[i])
        self.texts[page] = "".join(parts)

    def relinked(self, match: re.Match[str], path: Path, page: str) -> str:
        before, target = match["before"], match["target"]
        if re.match(r"[a-z]+:", target):
            return match[0]
        file = (path.parent / target).resolve()
        if not file.exists() or not file.is_relative_to(ROOT):
            raise SystemExit(f"{path.relative_to(ROOT)}: no file {target}")
        link = os.path.relpath(self.page_of(file), Path(page).parent)
        return before + link

    def page_of(self, file: Path) -> str:
        """Where a file of the repository is in the site."""
        name = file.relative_to(ROOT).as_posix()
        if name in PAGES:
            return PAGES[name]
        if name == "examples":
            return GALLERY
        if name == "docs":
            return "index.md"
        if file.is_relative_to(ROOT / "docs"):
            return name.removeprefix("docs/")
        if file.parent.name == "examples":
            return name.replace(".py", ".md")
        page = f"files/{name}/index.md" if file.is_dir() else f"files/{name}.md"
        if page not in self.texts:
            self.texts[page] = ""
            self.texts[page] = self.listing(file, page) if file.is_dir() else source(file)
        return page

    def listing(self, folder: Path, page: str) -> str:
        lines = [f"# {folder.relative_to(ROOT)}/", ""]
        for file in sorted(folder.iterdir()):
            if file.is_file():
                link = os.path.relpath(self.page_of(file), Path(page).parent)
                lines.append(f"* [`{file.name}`]({link})")
        return "\n".join(lines) + "\n"

    def add_gallery(self) -> None:
        cards = [
            "# Examples",
            "",
            "One file for each feature. Each runs on CPUs and on GPUs with torchrun.",
            "",
            '<div class="grid cards" markdown>',
            "",
        ]
        for file in sorted((ROOT / "examples").glob("*.py")):
            title, text = titled(file.stem), file.read_text(encoding="utf-8")
            purpose, command = described(text)
            page = f"examples/{file.stem}.md"
            marked = " ".join(
                str(i) for i, line in enumerate(text.splitlines(), 1) if "# <-" in line
            )
            self.texts[page] = (
                f"# {title}\n\n{purpose}.\n\n```bash\n{command}\n```\n\n"
                f'```python title="examples/{file.name}" hl_lines="{marked}"\n{text}```\n'
            )
            cards += [f"-   **[{title}]({file.stem}.md)**", "", f"    {purpose}.", ""]
        self.texts[GALLERY] = "\n".join([*cards, "</div>", ""])


def titled(stem: str) -> str:
    words = " ".join(WORDS.get(word, word) for word in stem.removeprefix("with_").split("_"))
    return words if words.startswith("fp16") else words[0].upper() + words[1:]


def described(text: str) -> tuple[str, str]:
    """What an example is for, and its command, by its docstring."""
    docstring = ast.get_docstring(ast.parse(text)) or ""
    purpose = re.split(r"[.:;](?:\s|$)", docstring)[0]
    command = re.search(r"torchrun [^\n;(]*\.py[^\n;(.]*", docstring)
    return purpose, command[0].strip() if command else ""


def source(file: Path) -> str:
    name, text = file.relative_to(ROOT), file.read_text(encoding="utf-8")
    return f"# {name}\n\n````{LANGUAGES.get(file.suffix, 'text')}\n{text.rstrip()}\n````\n"


def public_names(module: str) -> list[str]:
    """``__all__`` of a module, read and not imported."""
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    purpose = ast.get_docstring(tree) or ""

    def place(name: str) -> int:  # names that the docstring speaks of come first
        found = re.search(rf"\b{name}`", purpose)
        return found.start() if found else len(purpose)

    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value), key=place)
    raise SystemExit(f"{module}: expected __all__, which its page of the API lists")


def api_pages() -> dict[str, str]:
    pages = {}
    summary = ["# API", "", "| module | what it has |", "|---|---|"]
    for module, purpose in API.items():
        page = f"{module.partition('.')[2] or module}.md"
        summary.append(f"| [`{module}`]({page}) | {purpose} |")
        entries = [f"::: {module}.{name}" for name in public_names(module)]
        head = f"# {module}\n\n::: {module}\n    options:\n      members: []\n"
        head += "      show_root_heading: false\n      show_root_toc_entry: false\n"
        pages[f"api/{page}"] = head + "\n" + "\n\n".join(entries) + "\n"
    return {"api/index.md": "\n".join(summary) + "\n", **pages}


def on_config(config: MkDocsConfig) -> None:
    """The pages of the API in the place of ``api/``, and those of docs/ that no section has."""
    named = re.findall(r"[\w-]+\.md", str(config.nav))
    guides = next(section["Guides"] for section in config.nav if "Guides" in section)
    guides += sorted({path.name for path in (ROOT / "docs").glob("*.md")} - {*named})
    pages: list[object] = ["api/index.md"]
    pages += [{m: f"api/{m.partition('.')[2] or m}.md"} for m in API]

    def filled(entry: object) -> object:
        if isinstance(entry, dict):
            return {k: filled(v) for k, v in entry.items()}
        if isinstance(entry, list):
            return [filled(e) for e in entry]
        return pages if entry == "api/" else entry

    config.nav = filled(config.nav)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, text in Site().texts.items():
        old = files.get_file_from_path(page)
        if old is not None:
            files.remove(old)
        files.append(File.generated(config, page, content=text))
    return files
