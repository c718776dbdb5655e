"""`floe config check`: everything that is wrong with a configuration, before a service is started with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from common.errors import ConfigError
from common.service.cli import json_option, print_json, run_command

if TYPE_CHECKING:
    from common.service.config_document import Document


@click.group()
def config() -> None:
    """Check a configuration."""


@config.command()
@click.argument("file", envvar="FLOE_CONFIG")
@json_option
@run_command
def check(file: str, as_json: bool) -> int:
    """Check all documents of FILE; touches neither NATS nor the store.

    Exit 78 where something is wrong; each problem is a line `file:line:column: key: what`. A document whose
    egress and ingress would feed each other is warned of here and refused by every command that runs it.

    Example: floe config check /etc/floe/site.yaml
    """
    documents, errors = _check(file)
    loops = [problem for document in documents for problem in _loops(document)]
    if as_json:
        print_json(_as_json(file, documents, errors, loops))
    else:
        for error in errors:
            click.echo(error.line(), err=True)
        _print_documents(file, documents, loops, ok=not errors)
    return ConfigError.exit_code if errors else 0


def _check(file: str) -> tuple[list[Document], list[ConfigError]]:
    from common.service.config import read_documents
    from common.service.config_unbuilt import refuse_unbuilt

    try:
        documents = read_documents(file)
    except ConfigError as error:
        return [], [error]
    errors = []
    for document in documents:
        try:
            refuse_unbuilt(document)
        except ConfigError as error:
            errors.append(error)
    return documents, errors


def _loops(document: Document) -> list[str]:
    from common.service.config_unbuilt import refuse_loops

    try:
        refuse_loops(document)
    except ConfigError as error:
        return [f"{problem}; every command that runs it refuses it" for problem in error.problems]
    return []


def _print_documents(file: str, documents: list[Document], loops: list[str], *, ok: bool) -> None:
    for warning in dict.fromkeys([*(w for document in documents for w in document.warnings), *loops]):
        click.echo(f"warning: {warning}", err=True)
    for document in documents if ok else ():
        summary = _summary(document)
        site = f"site {summary['site']}, " if summary["site"] else ""
        place = f"{file}:{document.root.mark.line}"
        click.echo(f"{place}: ok ({site}{summary['feeds']} feeds, {summary['targets']} targets)")


def _summary(document: Document) -> dict[str, object]:
    settings = document.settings
    return {
        "site": settings.site,
        "feeds": len(settings.egress.feeds),
        "targets": len(settings.ingress.targets),
    }


def _as_json(
    file: str, documents: list[Document], errors: list[ConfigError], loops: list[str]
) -> dict[str, object]:
    return {
        "file": file,
        "ok": not errors,
        "documents": [_summary(document) for document in documents],
        "problems": [problem for error in errors for problem in _problems(error)],
        "warnings": [*(warning for document in documents for warning in document.warnings), *loops],
    }


def _problems(error: ConfigError) -> list[object]:
    found = getattr(error, "found", None)
    return list(found) if found else [{"message": str(error)}]
