"""The template of the subjects that advisories are published to."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from common.settings.types import Kind, Text, is_subject, refuse

EVENT, VALUE = "%s", "%v"
MAX_VALUE = 512  # bytes that a value may take in a subject
MAX_SUBJECT = 3500  # bytes; a server takes lines of 4,096, and a reply subject stands in them too

_UNKNOWN = re.compile("%(?![sv%])")


def _check(template: str) -> str:
    if not template:
        return template
    if not is_subject(template.replace(EVENT, "s").replace(VALUE, "v")):
        raise refuse("a subject without wildcards and empty tokens, %s and %v allowed")
    if _UNKNOWN.search(template):
        raise refuse("%s for the event, %v for the value, and % before no other letter")
    first = template.partition(".")[0]
    if VALUE in first or first.startswith("$"):
        # A value is what a publisher wrote: it must not choose whose subject this is, such as $JS.API.
        raise refuse("a first token of its own: without %v, and not beginning with $")
    if len(template.replace(VALUE, "v" * MAX_VALUE).encode()) > MAX_SUBJECT:
        raise refuse(f"at most {MAX_SUBJECT} bytes, counting {MAX_VALUE} for each %v")
    return template


AdvisorySubject = Annotated[Text, AfterValidator(_check), Kind("subject")]
