#!/usr/bin/env bash
# Builds a release from the commit that is checked out: bash infra/release.sh [FOLDER], dist by default (`make release`).
# Wheel, sdist, chart, CycloneDX documents, deb, rpm and notes, each built twice, in two places, and compared; then their
# checksums. A part whose tool is missing is skipped, with a line that names it. The tree has X.Y.Z.dev0; a release of it has X.Y.Z.
set -euo pipefail
umask 022
export LC_ALL=C TZ=UTC PYTHONHASHSEED=0
cd "$(dirname "$0")/.."
here=$PWD python=$PWD/.venv/bin/python out=$(realpath -m "${1:-dist}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

refuse() {
  echo "release: $1" >&2
  exit 1
}

# Runs a command, and shows its output only if it fails.
quietly() { "$@" >"$work/log" 2>&1 || { cat "$work/log" >&2 && refuse "failed: $*"; }; }

# The text below a heading of the second level, which is the second argument, of a page.
section() { awk -v heading="## $2" '/^## / { shown = $0 == heading; next } shown' "$1"; }
is_empty() { [ -z "$(section "$@" | tr -d '[:space:]')" ]; }

tree_version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
version=${tree_version%.dev*} commit=$(git rev-parse HEAD)
changed=$(git status --porcelain)
first=${changed%%$'\n'*}
[ -z "$changed" ] || refuse "expected a tree without changes, found $(wc -l <<<"$changed") changed, the first: ${first:3}; commit or remove them"
[ "$version" != "$tree_version" ] || refuse "pyproject.toml: expected a version that ends in .dev0, found $version"
! is_empty CHANGELOG.md "$version" || refuse "CHANGELOG.md: expected lines below '## $version', found none; write that section"
is_empty CHANGELOG.md Unreleased || refuse "CHANGELOG.md: expected nothing below '## Unreleased', found lines; move them below '## $version'"
tagged=$(git rev-parse -q --verify "refs/tags/v$version^{commit}" || true)
[ "${tagged:-$commit}" = "$commit" ] || refuse "expected no tag v$version at another commit, found ${tagged:0:12}; raise the version in pyproject.toml"
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH

packages=yes documents=yes
if ! command -v "${NFPM:-nfpm}" >/dev/null; then
  echo "skipped: deb and rpm: no nfpm here (go install github.com/goreleaser/nfpm/v2/cmd/nfpm@v2.43.4)"
  packages=
fi
if [ ! -x .venv/audit/bin/cyclonedx-py ]; then
  echo "skipped: CycloneDX documents: no cyclonedx-py here (make audit)"
  documents=
fi

notes() {
  echo "# Floe $version"
  echo
  echo "Tag \`v$version\`, commit \`$commit\`, $(date -d "@$SOURCE_DATE_EPOCH" +%F). Links are files of that commit."
  echo "\`sha256sum -c SHA256SUMS\` checks the files of the release."
  section CHANGELOG.md "$version"
  echo
  echo "## Supported versions"
  section docs/guides/upgrade.md "Supported versions" |
    sed -E 's#\]\(([a-z-]+\.md)#](docs/guides/\1#g; s#\]\(\.\./#](docs/#g'
}

# Builds everything into the folder $1, from a copy of the commit beside it.
build() (
  mkdir -p "$1" "$1.copy"
  git archive "$commit" | tar -x --no-same-permissions -C "$1.copy"
  cd "$1.copy"
  sed -i "s/^version = .*/version = \"$version\"/" pyproject.toml
  sed -i "s/^version: .*/version: $version/; s/^appVersion: .*/appVersion: \"$version\"/" infra/helm/floe/Chart.yaml
  quietly "$python" -m hatchling build -t sdist -t wheel -d "$1"
  # In the form of `helm package`: files only, the name of the chart before each.
  (cd infra/helm && find floe -type f | sort | tar -c -f - -T - --format=ustar --mtime="@$SOURCE_DATE_EPOCH" \
    --owner=0 --group=0 --numeric-owner --mode=0644) | gzip -n9 >"$1/floe-$version.tgz"
  ln -s "$here/.venv" .venv
  [ -z "$documents" ] || quietly bash infra/audit.sh "$1" documents
  [ -z "$packages" ] || quietly bash infra/package.sh "$1"
  notes | cat -s >"$1/RELEASE-NOTES.md"
)

build "$work/first"
build "$work/second"
diff -rq "$work/first" "$work/second" >&2 || refuse "expected two equal builds, found the differences above"
(cd "$work/first" && sha256sum -- * >"$work/SHA256SUMS")
mkdir -p "$out"
cp "$work"/first/* "$work/SHA256SUMS" "$out"
cat "$out/SHA256SUMS"
echo "Floe $version is in $out, built twice and equal; the tag: git tag v$version $commit"
