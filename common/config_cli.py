"""`floe config`: check a configuration, or convert one of stream-replicator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from common.cli import config_command, json_option, print_json, run_command
from common.errors import ConfigError, UsageError
from common.settings.types import format_count

if TYPE_CHECKING:
    from common.migration.write import Imported
    from common.settings.loader import ConfigDocument

#: Loaders of functions that only one role has: `contradictions` of `floe.PART_FUNCTIONS`.
RoleFunctions = Mapping[str, Callable[[], Any]]


@click.group()
def config() -> None:
    """Check a configuration, or make one from that of stream-replicator."""


@config.command()
@click.pass_obj
@config_command
def check(parts: RoleFunctions, config: str, as_json: bool) -> int:
    """Check all documents of a configuration; connects to neither NATS nor the store, as `floe doctor` does.

    Exit 78 if there is a problem; each one is a line `file:line:column: key: text`. If egress and ingress of a
    document would feed each other, this command warns, and every command that runs the document refuses it.
    It also warns of secrets that others may read, and of connections without encryption or verification.

    \b
    Example: floe config check -c /etc/floe/site.yaml
    """
    documents, errors, loops = _check(config, parts)
    warnings = list(dict.fromkeys([*(warning for each in documents for warning in each.warnings), *loops]))
    if as_json:
        print_json({
            "file": config,
            "ok": not errors,
            "documents": [_summary(document) for document in documents],
            "problems": [problem for error in errors for problem in _problem_rows(error)],
            "warnings": warnings,
        })  # fmt: skip
    else:
        _print_checked(config, documents, errors, warnings)
    return ConfigError.exit_code if errors else 0


def _check(file: str, parts: RoleFunctions) -> tuple[list[ConfigDocument], list[ConfigError], list[str]]:
    from common.settings.loader import add_combinations, find_loops, read_documents
    from common.settings.yaml import ConfigFileError, Problems

    try:
        documents = read_documents(file)
    except ConfigError as error:
        return [], [error], []
    errors: list[ConfigError] = []
    refused: list[str] = []
    for document in documents:
        wrong = Problems(document.name)
        if document.settings.ingress.targets:
            found = parts["contradictions"]()(document.settings.ingress)
            add_combinations((), found, document.root, wrong)
        errors += [ConfigFileError(wrong)] if wrong else []
        refused += [f"{problem}; every command that runs it refuses it" for problem in find_loops(document)]
    return documents, errors, refused


def _print_checked(file: str, documents: list[ConfigDocument], errors: list[ConfigError], warnings: list[str]) -> None:
    lines = [error.as_text() for error in errors] + [f"warning: {warning}" for warning in warnings]
    for line in lines:
        click.echo(line, err=True)
    for document in documents if not errors else ():
        summary = _summary(document)
        site = f"site {summary['site']}, " if summary["site"] else ""
        feeds, targets = format_count(summary["feeds"], "feed"), format_count(summary["targets"], "target")
        place = f"{file}:{document.root.mark.line}"
        click.echo(f"{place}: ok ({site}{feeds}, {targets})")


def _summary(document: ConfigDocument) -> dict[str, Any]:
    settings = document.settings
    return {"site": settings.site, "feeds": len(settings.egress.feeds_), "targets": len(settings.ingress.targets)}


def _problem_rows(error: ConfigError) -> list[object]:
    found = getattr(error, "found", None)
    return list(found) if found else [{"message": str(error)}]


@config.command("import-stream-replicator")
@click.argument("file")
@click.option("--out-dir", metavar="DIR", help="Write the files into this folder; none may exist yet.")
@json_option
@run_command
def import_stream_replicator(file: str, out_dir: str | None, as_json: bool) -> int:
    """Print the configuration FILE of stream-replicator as files of Floe: a site.yaml for each source, a
    central.yaml for each target.

    Also of the form before 0.5, with `topics`. Comments name every key that is not imported, and the reason; secrets
    become variables and are never printed. Exit 78 if there is a problem; each one is a line
    `file:line:column: key: text`.

    \b
    Example: floe config import-stream-replicator /etc/stream-replicator/sr.yaml --out-dir /etc/floe
    """
    from common.migration import write
    from common.settings.loader import read_file

    try:
        imported = write.import_stream_replicator(read_file(file)[0], file)
    except ConfigError as error:
        if not as_json:
            raise
        print_json({"file": file, "ok": False, "problems": _problem_rows(error)})
        return ConfigError.exit_code
    if out_dir is not None:
        write_files({each.name: each.text for each in imported.files}, Path(out_dir), "--out-dir")
    if as_json:
        print_json(_imported_json(file, imported))
    elif out_dir is None:
        click.echo("---\n".join(each.text for each in imported.files), nl=False)
    else:
        _print_written(imported, out_dir)
    return 0


def write_files(files: Mapping[str, str], folder: Path, option: str) -> None:
    """Write all files. `option`: that names the folder. Raises UsageError if one of the files exists already, before
    any is written, and for a folder that cannot be made or written.
    """
    try:
        if there := [str(folder / name) for name in files if (folder / name).exists()]:
            raise UsageError(f"{there[0]}: expected no such file, found one", hint=f"choose another {option}")
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with (folder / name).open("x", encoding="utf-8") as made:
                made.write(text)
    except (FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise UsageError(f"{option} {folder}: expected a folder to write into, found: {error.strerror}") from error


def _print_written(imported: Imported, out_dir: str) -> None:
    for each in imported.files:
        click.echo(str(Path(out_dir) / each.name))
    for note in imported.notes:
        click.echo(f"note: {note}", err=True)
    if imported.variables:
        click.echo(f"set in the environment: {' '.join(imported.variables)}", err=True)


def _imported_json(file: str, imported: Imported) -> dict[str, object]:
    return {
        "file": file,
        "ok": True,
        "documents": [
            {"name": each.name, "site": each.site, "text": each.text, "variables": each.variables}
            for each in imported.files
        ],
        "notes": [
            {"path": note.path, "line": note.mark.line, "column": note.mark.column, "text": note.text}
            for note in imported.notes
        ],
        "variables": imported.variables,
    }
