"""Make code files that pages link to into pages of the site, under the same links.

Also rank guides above reference pages in the search; those have the most words.
"""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LANGUAGES = {".py": "python", ".yaml": "yaml", ".sbatch": "bash"}
REFERENCE = ("docs/api/", "docs/evidence", "docs/tested-scripts", "CHANGELOG", "BENCHMARKS")


class Code(File):
    def is_documentation_page(self) -> bool:
        return True


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for file in list(files):
        language = LANGUAGES.get(Path(file.src_uri).suffix)
        if language is not None:
            lines = file.content_string.splitlines()
            marked = [str(n) for n, line in enumerate(lines, 1) if "# <-" in line]
            text = "\n".join(
                [
                    f"# {file.src_uri}",
                    f'````{language} hl_lines="{" ".join(marked)}"',
                    *lines,
                    "````",
                ]
            )
            files.remove(file)
            files.append(Code.generated(config, file.src_uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    if page.file.src_uri.startswith(REFERENCE):
        page.meta["search"] = {"boost": 0.2}
