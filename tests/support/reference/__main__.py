"""Write the generated pages."""

from tests.support import reference

for path in sorted(reference.PAGES):
    path.parent.mkdir(exist_ok=True)
    path.write_text(reference.page(path))
