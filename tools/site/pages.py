"""Files of code that pages link to become pages of the site, under the same links."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

LANGUAGES = {".py": "python", ".yaml": "yaml", ".sbatch": "bash"}


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
