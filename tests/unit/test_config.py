"""Configuration files: strict reading, problems with their places, and secrets that are never shown."""

import os
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from common.clock import SystemClock
from common.errors import ConfigError, Refused
from common.nats.credentials import apply_context, load_credential, tls_context
from common.objects.open import open_objects
from common.observe.monitor import Health, Monitor
from common.settings.loader import load, load_document, parse, parse_documents
from common.settings.root import Settings, StoreSettings
from common.settings.service import MonitorTlsSettings, NatsSettings

HEAD = "site: us-east\nstore: {url: s3://floe}\n"


def problems(text: str | bytes, environment: dict[str, str] | None = None) -> list[str]:
    """Return the problems of a file f.yaml that holds `text`."""
    data = text if isinstance(text, bytes) else textwrap.dedent(text).encode()
    with pytest.raises(ConfigError) as caught:
        parse_documents(data, "f.yaml", environment or {})
    assert caught.value.exit_code == 78
    return list(caught.value.problems)


def one(text: str, environment: dict[str, str] | None = None) -> Settings:
    """Return the only document of `text`."""
    [document] = parse_documents(textwrap.dedent(text).encode(), "f.yaml", environment or {})
    return document.settings


def test_all_problems_come_at_once_with_file_line_column_path_expected_and_found():
    assert problems(
        """\
        site: a b
        store:
          url: s3://floe
          checksum: md5
        egress:
          lease_ttl: 5
          feeds:
            - stream: NODE_DATA
              segment: {max_sise: 1G, max_age: 100ms}
            - name: X
        """
    ) == [
        "f.yaml:1:7: site: expected 1 to 63 of A-Z a-z 0-9 _ -, the first not _ or -, found a b",
        "f.yaml:4:13: store.checksum: expected one of sha256 | none, found md5",
        "f.yaml:6:14: egress.lease_ttl: expected a duration such as 500ms 5s 5m 1h30m 7d 1w, found 5",
        "f.yaml:9:17: egress.feeds.0.segment.max_sise: unknown key; did you mean max_size?",
        "f.yaml:9:40: egress.feeds.0.segment.max_age: expected 1s to 1d (each segment is an object, "
        "and a request at every reader), found 100ms",
        "f.yaml:10:7: egress.feeds.1.stream: expected a value (required), found nothing",
    ]


MISTYPED_KEYS = [
    ("site: a\nSTORE: {URL: 'file:///b'}\n", ["2:1: STORE: store"]),
    ("sites: x\n", ["1:1: sites: site"]),
    (HEAD + "log: {level: info}\nlogg: {levle: info}\n", ["4:1: logg: log"]),
    (f"{HEAD}loq: {{}}\n---\n{HEAD}sites: x\n", ["3:1: loq: log", "7:1: sites: site"]),
    (HEAD + "egress: {defaults: {segmnt: {}}, feeds: [{stream: A}]}\n", ["3:21: egress.defaults.segmnt: segment"]),
]


@pytest.mark.parametrize(("text", "keys"), MISTYPED_KEYS)
def test_a_mistyped_key_is_named_once_with_a_suggestion(text: str, keys: list[str]):
    unknown = [line for line in problems(text) if "unknown key" in line]
    assert [line.replace("unknown key; did you mean ", "") for line in unknown] == [f"f.yaml:{each}?" for each in keys]


def feed(keys: str) -> str:
    return f"egress: {{feeds: [{{stream: A, {keys}}}]}}"


NO_DURATION = "expected a duration such as 500ms 5s 5m 1h30m 7d 1w, found"
NO_NAME = "3:7: site: expected 1 to 63 of A-Z a-z 0-9"
NOT_A_VARIABLE = "3:7: site: expected ${VAR} or ${VAR:-default}, found another expression; write $${"
WRONG = [
    ("log: {colour: red}", "3:7: log.colour: unknown key; expected one of level format"),
    ("nats:\n  connect_timeout: soon", f"4:20: nats.connect_timeout: {NO_DURATION} soon"),
    ("egress:\n  defaults: {max_age: 7}\n  feeds: [{stream: A}]", f"4:23: egress.defaults.max_age: {NO_DURATION} 7"),
    (feed("segment: {max_size: 10XB}"), "3:50: egress.feeds.0.segment.max_size: expected a size such as 64K 100M 4G"),
    (feed("segment: {max_size: 1}"), "3:50: egress.feeds.0.segment.max_size: expected 64K to 4G (smaller segments are"),
    ("log:\n  level: info\n  level: debug", "5:3: log.level: expected each key once, found it on line 4 too"),
    # Text and variables
    *((f"site: {text}", f"3:7: site: expected text; quote it, found {text}") for text in ("true", "1e3", "12")),
    *((f"site: {name}", NO_NAME) for name in ("a/b", "x" * 64, "\U0001f680", '"${PASS}"')),
    # `password_file` may hold the secret itself by mistake.
    ('nats: {user: u, password_file: "${PASS}"}', "3:32: nats.password_file: expected a file that can be read"),
    ('nats: {user: u, password: "${PW:-}"}', "3:27: nats.password: expected a secret in ${PW:-}, found nothing"),
    ('site: "${NOT_SET}"', "3:7: site: expected the environment variable NOT_SET, found it unset"),
    *((f'site: "{text}"', NOT_A_VARIABLE) for text in ("${A:-${B}}", "${A", "${1A}")),
    # Keys that exclude each other
    ("nats: {token: t}\ningress: {nats: {credentials_file: /c}}", "3:15: nats.token: expected one way to authenticate"),
    ("egress: {feeds: [{stream: A}, {stream: A}]}", "3:31: egress.feeds.1.name: expected a unique name"),
    # Stores and servers
    ("store: {url: 's3://A_b'}", "3:14: store.url: expected s3://BUCKET, the bucket 3 to 63 of a-z 0-9 . -"),
    (
        "store: {url: s3://floe, endpoint_url: 'https://u:SEKRET@h'}",
        "3:39: store.endpoint_url: expected https://HOST:PORT",
    ),
    ("nats: {url: 'nats://u:SEKRET@h'}", "3:13: nats.url: expected nats://HOST:PORT or tls://HOST:PORT without user"),
]


@pytest.mark.parametrize(("text", "rest"), WRONG, ids=[text[:40] for text, _ in WRONG])
def test_each_problem_is_shown_once_at_its_place(text: str, rest: str):
    lines = HEAD.splitlines(keepends=True)
    head = "".join("\n" if text.startswith(line.partition(":")[0]) else line for line in lines)
    [found] = problems(f"{head}{text}\n", {"PASS": "SEKRET 77"})
    assert (found[: len(f"f.yaml:{rest}")], "SEKRET" in found) == (f"f.yaml:{rest}", False)


def test_control_characters_of_a_value_and_the_line_of_a_syntax_error_do_not_reach_the_terminal():
    [found] = problems('nats: {password: "hunter2}\n')
    assert "hunter2" not in found
    with pytest.raises(ConfigError) as caught:
        parse('site: "\\e[31mred\\nerror[E-OTHER]: forged"\nstore: {url: s3://floe}\n', "f.yaml")
    assert not {"\n", "\x1b"} & {*caught.value.as_text()}


def test_text_that_only_yaml_1_1_would_change_stays_text_and_a_number_is_written_in_decimal_without_quotes():
    for value in ("no", "on", "012", "1_000", "0o7"):
        assert one(f"site: {value}\nstore: {{url: s3://floe}}\n").site == value
    shown = {"[]": "an empty list", "{a: 1}": "a mapping"}
    for value in ('"5"', "1.0", "1:30", "0x10", "[]", "{a: 1}"):
        expected = [f"f.yaml:3:23: egress.kv_replicas: expected a whole number, found {shown.get(value, value)}"]
        assert problems(HEAD + f"egress: {{kv_replicas: {value}}}\n") == expected


NOT_PLAIN = [
    ("a: !!python/object/apply:os.system ['touch /tmp/owned']\n", "f.yaml:1:4: a: expected a value, found the tag"),
    ("site: !custom x\n", "f.yaml:1:7: site: expected a value, found the tag !custom: remove it"),
    ("site: &a x\n", "f.yaml:1:7: site: expected a value, found the anchor &a: remove it"),
    ("site: *a\n", "f.yaml:1:7: site: expected a value, found the alias *a: write it out"),
    ("log: {<<: {level: info}}\n", "f.yaml:1:7: log.<<: expected a key, found a merge key: write it out"),
    ("log: {? [a] : b}\n", "f.yaml:1:9: log: expected a key, found a mapping or a list"),
    ("a: [\n", "f.yaml:2:1: expected YAML: while parsing a flow node"),
    ("a:\n\tb: c\n", "f.yaml:2:1: expected YAML: while scanning for the next token found character '\\t'"),
    ("a: \x07\n", "f.yaml:1:4: expected text, found the character"),
    ("", "f.yaml:1:1: expected a mapping, found an empty file"),
    ("---\n", "f.yaml:2:1: expected a mapping at the top, found nothing"),
    ("- a\n", "f.yaml:1:1: expected a mapping at the top, found a list"),
    (b"\xff\xfes\x00i\x00", "f.yaml: expected UTF-8 text, found UTF-16"),
    (b"\x89PNG\r\n", "f.yaml: expected UTF-8 text, found other bytes at offset 0"),
    (b"#" * (1024 * 1024 + 1), "f.yaml: expected at most 1048576 bytes, found more"),
    # A parser would need minutes to expand these, and a recursive reader would exceed the recursion limit.
    ("a: " + "[" * 500_000, "f.yaml:1:36: expected at most 32 levels, found more"),
    ("a: {" + "? {" * 300_000, "expected at most 32 levels, found more"),
    ("a: [" + "[]," * 60_000, "expected at most 50000 keys and values, found more"),
    ("a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60)), "the anchor &a0"),
]


@pytest.mark.parametrize(("text", "expected"), NOT_PLAIN, ids=lambda value: repr(value[:40]))
def test_what_is_not_plain_yaml_is_refused_with_its_place_before_all_of_it_is_parsed(text: str | bytes, expected: str):
    assert [line for line in problems(text) if expected in line]


def test_secrets_and_passwords_in_urls_are_never_shown():
    found = problems(
        'nats: {url: "nats://me:hunter2@host:4222", password: 12345678, user: [hunter2]}\n'
        'store: {url: s3://floe, secret_access_key: [hunter2], endpoint_url: "https://k:hun/ter2@minio"}\n'
        "compaction: {spark: {conf: {spark.hadoop.fs.s3a.secret.key: 5551234}}}\n"
    )
    assert len(found) == 6
    assert not [line for line in found if "hun" in line or "12345678" in line or "5551234" in line]
    assert any(line.endswith("found a secret") for line in found)


# Variables and files


def test_variables_are_put_in_after_parsing_and_a_byte_order_mark_does_no_harm():
    settings = one(
        '\ufeffsite: "${SITE}"\nstore:\n  url: "s3://${BUCKET:-floe}-x"\n  access_key_id: "${KEY}"\n'
        '  secret_access_key: "${SECRET}"\n'
        'egress: {kv_replicas: "${REPLICAS}", lease_ttl: "${TTL:-20s}"}\nlog: {format: "${FORMAT:-}json"}\n'
        'nats: {tls: {insecure: "${YES}"}}\ninstance: "$${not} $5 ${EMPTY:-default}"\n',
        {"SITE": "012", "KEY": "a", "SECRET": "x: # ${SITE}", "REPLICAS": "3", "YES": "true", "EMPTY": ""},
    )
    assert (settings.site, settings.store.url, settings.egress.kv_replicas) == ("012", "s3://floe-x", 3)
    assert (settings.egress.lease_ttl, settings.nats.tls.insecure) == (20.0, True)
    assert settings.store.secret_access_key.get_secret_value() == "x: # ${SITE}"
    assert settings.instance == "${not} $5 default"


def test_a_secret_is_read_from_a_file_without_its_line_end(tmp_path: Path):
    (tmp_path / "pw").write_text("  p: #w\n\n")
    (tmp_path / "s3").write_bytes(b"s3\r\n")
    settings = one(
        f"nats: {{user: u, password_file: {tmp_path}/pw}}\n"
        f"store: {{url: s3://floe, access_key_id: a, secret_access_key_file: {tmp_path}/s3}}\n"
        f"ingress: {{nats: {{user: '', password_file: '', token_file: {tmp_path}/s3}}}}\n"
    )
    assert settings.nats.password.get_secret_value() == "  p: #w\n"
    assert settings.store.secret_access_key.get_secret_value() == "s3"
    assert settings.nats_for("ingress").token.get_secret_value() == "s3"


def test_an_unreadable_secret_file_is_named_without_its_content(tmp_path: Path):
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"\xff\xfehunter2")
    os.mkfifo(tmp_path / "pipe")
    found = problems(
        f"""\
        nats: {{user: u, password_file: {tmp_path}/missing}}
        egress: {{nats: {{user: '', password: '', token_file: {tmp_path}/empty}}}}
        ingress: {{nats: {{password: x, password_file: {tmp_path}}}}}
        store: {{url: s3://floe, access_key_id: a, secret_access_key_file: {tmp_path}/binary}}
        ---
        nats: {{user: u, password_file: {tmp_path}/pipe}}
        egress: {{nats: {{user: '', password: '', token_file: {tmp_path}}}}}
        store: {{url: s3://floe, access_key_id: a, secret_access_key_file: /dev/zero}}
        """
    )
    assert [line.split(": ", 1)[1] for line in found] == [
        f"nats.password_file: expected a file that can be read, found {tmp_path}/missing: No such file or directory",
        f"egress.nats.token_file: expected a secret in {tmp_path}/empty, found nothing",
        "ingress.nats.password_file: expected either password or password_file, found both",
        f"store.secret_access_key_file: expected UTF-8 text in {tmp_path}/binary, found other bytes",
        f"nats.password_file: expected a file that can be read, found {tmp_path}/pipe: is not a regular file",
        f"egress.nats.token_file: expected a file that can be read, found {tmp_path}: is not a regular file",
        "store.secret_access_key_file: expected a file that can be read, found /dev/zero: is not a regular file",
    ]


NO_FILES = [
    ("pipe", "expected a mapping, found an empty file"),
    ("/dev/zero", "expected a file that can be read, found: is not a regular file"),
    (".", "expected a file that can be read, found: is a directory"),
    ("x.yaml", "x.yaml: expected a file that can be read, found: no such file or directory"),
]


@pytest.mark.parametrize(("name", "why"), NO_FILES)
def test_a_configuration_that_is_no_file_is_refused_at_once(name: str, why: str, tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=why):
        load(str(tmp_path / name))


def _monitor_tls(**files: str) -> None:
    Monitor("127.0.0.1:0", Health(SystemClock()), tls=MonitorTlsSettings(**files)).start()


@pytest.mark.parametrize(
    ("use", "keys"),
    [
        (lambda **files: load_credential(NatsSettings(**files), SystemClock()), "credentials_file"),
        (lambda **files: load_credential(NatsSettings(**files), SystemClock()), "nkey_seed_file"),
        (lambda **files: load_credential(NatsSettings(nkey_seed_file="/no", **files), SystemClock()), "jwt_file"),
        (lambda **files: tls_context(NatsSettings(tls=files)), "ca"),
        (lambda **files: tls_context(NatsSettings(tls=files)), "cert key"),
        (_monitor_tls, "cert key"),
        (lambda **files: open_objects(StoreSettings(url="s3://floe", tls=files)), "ca"),
        (lambda context: apply_context(NatsSettings(context=context)), "context"),
    ],
    ids=["credentials", "seed", "jwt", "nats ca", "nats cert", "monitor", "store ca", "context"],
)
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_file_is_refused_wherever_the_configuration_names_one(
    use: Callable[..., object], keys: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Refuse a pipe, for example: opening one that has no writer would block for ever."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (path := tmp_path / "nats" / "context" / "it.json").parent.mkdir(parents=True)
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    with pytest.raises((ConfigError, Refused)) as caught:
        use(**dict.fromkeys(keys.split(), "it" if keys == "context" else str(path)))
    assert f"{path}" in caught.value.message
    assert caught.value.message.endswith("is not a regular file")


def test_a_configuration_may_come_through_a_pipe_as_a_shell_makes_it():
    ours, its = os.pipe()
    writer = threading.Thread(target=lambda: (time.sleep(0.1), os.write(its, HEAD.encode()), os.close(its)))
    writer.start()
    try:
        assert load(f"/dev/fd/{ours}").site == "us-east"
    finally:
        writer.join()
        os.close(ours)


# Files


def test_load_takes_a_file_with_one_document_and_points_to_check(tmp_path: Path):
    (file := tmp_path / "site.yaml").write_text(f"{HEAD}---\n{HEAD}")
    with pytest.raises(ConfigError, match=f"expected one document, found 2; .*:\nfloe config check -c {file}"):
        load(str(file))


def test_problems_between_sections_point_at_their_keys():
    for text, wrong in (
        ("store: {url: s3://floe}\negress: {feeds: [{stream: A}]}\n", "site: expected a name if egress has feeds"),
        ("store: {url: file:///b}\ningress: {events: sqs://Q}\n", "ingress.events: expected none with a file:// store"),
    ):
        [problem] = problems(text)
        assert wrong in problem


QUICK_LEVEL = "levels: [{from: 0, to: 1, min_age: 59s}]"


def test_times_of_compaction_that_take_segments_from_readers_are_refused_or_warned_of(tmp_path: Path):
    grace, age = "compaction.delete_grace: expected a time", "compaction.levels.0.min_age: expected at least 1m, found"
    refused = {"delete_grace: 0s": [grace], QUICK_LEVEL: [age], f"delete_grace: 0s, {QUICK_LEVEL}": [grace, age]}
    for text, wrong in refused.items():
        found = problems(f"{HEAD}compaction: {{{text}}}\n")
        assert [each for each, line in zip(wrong, found, strict=True) if each not in line] == []
        assert all("allow_short_times: true" in line for line in found)
    taken = {f"delete_grace: 0s, allow_short_times: true, {QUICK_LEVEL}": 0, "delete_grace: 0s, delete: false": 0}
    for text, cautions in {**taken, "delete_grace: 1h": 1, "delete_grace: 6h": 0}.items():
        (file := tmp_path / "site.yaml").write_text(f"{HEAD}compaction: {{{text}}}\n")
        assert str(load_document(str(file)).warnings).count("compaction.delete_grace: 1h") == cautions


def test_storage_classes_that_cannot_be_read_at_once_or_do_not_exist_are_refused():
    s3, place = "url: s3://floe", "compaction.levels.0.storage_class: expected"
    for store, levels, wrong in (
        (f"{s3}, storage_class: GLACIER", "to: 2", "store.storage_class: expected a class whose objects can be read"),
        (s3, "to: 2, storage_class: DEEP_ARCHIVE", f"{place} a class whose objects can be read at once"),
        (s3, "to: 2, storage_class: ia", f"{place} a storage class such"),
        ("url: file:///b", "to: 2, storage_class: X", f"{place} none with a file:// store, found X"),
        (s3, "to: 2}, {from: 0, to: 2, storage_class: X", "levels.1.storage_class: expected '', as levels.0"),
    ):
        [problem] = problems(f"store: {{{store}}}\ncompaction: {{levels: [{{from: 1, {levels}}}]}}\n")
        assert wrong in problem
    one(f"store: {{{s3}, storage_class: GLACIER_IR}}\ncompaction: {{levels: [{{from: 1, to: 2, storage_class: IA}}]}}")


def test_a_file_that_everybody_may_write_and_servers_that_are_not_checked_are_warned_of(tmp_path: Path):
    file = tmp_path / "site.yaml"
    file.write_text(HEAD.replace("s3://floe", "s3://floe, tls: {insecure: true}") + "nats: {tls: {insecure: true}}\n")
    os.chmod(file, 0o666)
    assert load_document(str(file)).warnings == (
        f"{file}: every user of this host may write it",
        "egress.nats.tls.insecure: the server's certificate is not checked",
        "ingress.nats.tls.insecure: the server's certificate is not checked",
        "store.tls.insecure: the server's certificate is not checked",
    )


def test_secrets_that_others_may_read_are_warned_of_with_the_command_to_paste(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SECRET", "s")
    monkeypatch.setenv("FOLDER", str(tmp_path))
    file, secret, nkey = (tmp_path / name for name in ("my site.yaml", "token", "user.nk"))
    for each in (secret, nkey):
        each.write_text("t-o-k-e-n")

    def warnings(text: str, mode: int) -> tuple[str, ...]:
        file.write_text(HEAD + text)
        for each in (file, secret, nkey):
            os.chmod(each, mode)
        return load_document(str(file)).warnings

    exposed = "a secret that others may read: chmod 600"
    for mode in (0o604, 0o640):
        assert warnings("nats: {user: u, password: p}\n", mode) == (
            f"{file}: holds nats.password, and others may read it: chmod 600 '{file}'",
        )
        for written in (secret, "${FOLDER}/token"):
            assert warnings(f"nats: {{token_file: '{written}'}}\n", mode) == (f"{secret}: {exposed} {secret}",)
    assert warnings("nats: {user: u, password: '${SECRET}'}\n", 0o644) == ()
    assert warnings("nats: {user: u, password: p}\n", 0o600) == ()
    assert warnings(f"ingress: {{nats: {{nkey_seed_file: {nkey}}}}}\n", 0o644) == (f"{nkey}: {exposed} {nkey}",)
    monkeypatch.setattr(os, "getegid", lambda: -1)  # not the group of the file
    assert warnings(f"nats: {{token_file: {secret}}}\n", 0o640) == ()
    assert warnings(f"nats: {{token_file: {secret}}}\n", 0o644)[0].endswith(f"chmod 640 {secret}")


STORE_URLS = [
    *((url, True) for url in ("http://store.example:8333", "http://10.0.0.7")),
    *((f"http://{host}:8333", False) for host in ("localhost", "127.0.0.1", "[::1]")),
    ("https://store.example", False),
]


@pytest.mark.parametrize(("url", "warned"), STORE_URLS)
def test_a_store_of_another_host_in_clear_is_refused_or_warned_of(tmp_path: Path, url: str, warned: bool):
    file = tmp_path / "site.yaml"
    store = f"s3://floe, endpoint_url: '{url}'"
    if warned:
        [refused] = problems(HEAD.replace("s3://floe", store))
        assert "expected https:// for a store on another host" in refused
        assert "allow_plaintext: true" in refused

    file.write_text(HEAD.replace("s3://floe", f"{store}, allow_plaintext: true"))
    os.chmod(file, 0o600)
    found = load_document(str(file)).warnings
    expected = f"store.endpoint_url: {url}: payloads are sent in clear (keys are not); use https://"
    assert found == ((expected,) if warned else ())
