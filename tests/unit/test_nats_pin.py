"""The internals of nats-py on which the client is built: an upgrade must be reviewed.

If a test here fails after an upgrade: review the changes in the named methods against
`common/nats/client.py`, run the integration tests, then take over the new digests.
"""

import hashlib
import inspect
from importlib.metadata import version

import pytest
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport

from common.nats.client import FloeClient

# Overridden, called, or relied upon for their effects on the attributes below.
METHODS = {
    Client: {
        "connect": "a333807745c3", "_attempt_reconnect": "2bbc96e0f2f7", "_close": "9a92d3aca1b2",
        "_connect_command": "1999c01f55c9", "_connect_to_server": "1356d992325f", "_flush_pending": "317c8d7ef54b",
        "_flusher": "43957ffb357d", "_ping_interval": "e681a6d18db6", "_process_connect_init": "e1ed2da075c8",
        "_process_info": "ecca7bb93130", "_process_msg": "6cff75947e97", "_process_op_err": "d4257cb1203c",
        "_process_ping": "7dfc2df74827", "_process_pong": "ee4c4d01a16d", "_read_loop": "b44b9401f436",
        "_select_next_server": "c278559f8a14", "_send_command": "ed57e8e86389", "flush": "b410d7515bcc",
        "new_inbox": "1e23641cb0a8",
    },
    Subscription: {"__init__": "2802b4167b60"},
    TcpTransport: {
        "connect": "96c97f9bad05", "connect_tls": "6688ffffefa2", "read": "88fd9f3e084e",
        "writelines": "bef96469be62", "drain": "899995c7bc2e",
    },
}  # fmt: skip
ATTRIBUTES = [
    "_pending", "_pending_data_size", "_flush_queue", "_pongs", "_subs", "_sid", "_ps", "_transport", "_status",
    "_server_info", "_server_pool", "_current_server", "_public_nkey", "_reading_task", "_ping_interval_task",
    "_flusher_task", "_max_payload",
]  # fmt: skip
OURS = {
    "_abort", "_check_loopback", "_mark_down", "_mark_up", "_notify_listeners", "_on_error", "_on_line", "_on_message",
    "_on_reconnected", "_on_server_error", "_on_sink_error", "_sent_subject", "_stop_tasks", "_wire",
}  # fmt: skip


def test_the_version_is_the_one_that_was_read():
    assert version("nats-py").split(".")[:2] == ["2", "16"]


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, names in METHODS.items() for name in names])
def test_the_methods_it_is_built_on_are_the_ones_that_were_read(owner: type, name: str):
    assert hashlib.sha256(inspect.getsource(getattr(owner, name)).encode()).hexdigest()[:12] == METHODS[owner][name]


async def test_the_attributes_it_uses_and_what_is_overridden_exist():
    client = Client()
    assert [name for name in ATTRIBUTES if not hasattr(client, name)] == []
    own = {name for name in vars(FloeClient) if name.startswith("_") and not name.startswith("__")}
    assert {name for name in own - OURS if not hasattr(Client, name)} == set()
