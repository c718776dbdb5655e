"""boto3 clients: this module alone imports boto3, for S3 and for SQS."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import boto3.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from common.errors import ConfigError

__all__ = ["Account", "BotoCoreError", "ClientError", "make_client"]


@dataclass(frozen=True, slots=True)
class Account:
    """Who asks, and where.

    Without `access_key_id` the credential comes from where AWS tools find theirs. `endpoint_url` None: what
    AWS tools ask, so `AWS_ENDPOINT_URL_SQS` and the like count. `region` None: theirs, else us-east-1.
    `verify`: which certificates are trusted, as boto3 takes it.
    """

    access_key_id: str | None = None
    secret_access_key: str | None = field(default=None, repr=False)
    region: str | None = None
    endpoint_url: str | None = None
    verify: bool | str | None = None


def make_client(service: str, account: Account, place: str, **config: Any) -> Any:
    """A client of `service`, `s3` or `sqs`; nothing is asked yet. `config`: as botocore's Config takes it.

    Raises ConfigError, which names `place`, where the address or the region is none.
    """
    session = boto3.session.Session(account.access_key_id, account.secret_access_key)
    client: Any = session.client  # one signature for all services; the stubs know one for each
    try:
        return client(
            service,
            endpoint_url=account.endpoint_url,
            region_name=account.region or session.region_name or "us-east-1",
            verify=account.verify,
            config=Config(
                tcp_keepalive=True,
                proxies={},  # none from the environment, which could send the data elsewhere
                user_agent_appid="floe",  # type: ignore[call-arg]  # the stubs do not know it
                **config,
            ),
        )
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"{place}: {error}", code="E-S3-REQUEST") from error
