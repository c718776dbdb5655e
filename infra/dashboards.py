"""The generator of the Grafana dashboard: `python -m infra.dashboards` writes `infra/grafana/floe.json`.

The file is committed. A test checks that it agrees with this module, and that every metric in it exists.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARD_PATH = Path(__file__).parent / "grafana" / "floe.json"

GRID_WIDTH, PANEL_HEIGHT = 24, 8  # of Grafana's grid; of a panel

BY_SITE = 'site=~"$site"'
BY_TARGET = 'target=~"$target"'
BY_BOTH = f"{BY_TARGET},{BY_SITE}"
CHAIN_LEGEND = "{{site}}/{{feed}}/{{partition}}"
COPY_LEGEND = f"{{{{target}}}} {CHAIN_LEGEND}"
INSTANCE_LEGEND = "{{job}} {{instance}}"


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `expressions`: each with the legend of its series. `unit`: as Grafana names it.

    `kind`: `timeseries`, or `stat` for a number that is red from `red_from` on.
    """

    title: str
    expressions: Mapping[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    red_from: float | None = None
    width: int = 8


def rate(metric: str, selector: str = "", by: str = "") -> str:
    """Return the expression for the increase of a counter per second, summed by the labels `by` if there are any."""
    found = f"rate(floe_{metric}{{{selector}}}[$__rate_interval])"
    return f"sum by ({by}) ({found})" if by else found


def quantile(metric: str, selector: str, by: str) -> str:
    """Return the expression for the value below which 95 % of a histogram's observations lie."""
    return f"histogram_quantile(0.95, {rate(f'{metric}_bucket', selector, f'{by}, le')})"


def stat_panel(title: str, expression: str, *, unit: str = "short", red_from: float | None = 1) -> Panel:
    """Return a panel with one number, red from `red_from` on."""
    return Panel(title, {expression: ""}, unit, "stat", red_from, width=4)


ROWS: Mapping[str, Sequence[Panel]] = {
    "Sites, as the centre knows them": (
        stat_panel("silent sites", f"sum(floe_ingress_site_silent{{{BY_SITE}}})"),
        stat_panel("silent chains", f"sum(floe_ingress_source_silent{{{BY_SITE}}})"),
        stat_panel("chains stopped at a site", f"sum(floe_ingress_source_stopped{{{BY_SITE}}})"),
        stat_panel("chains stopped here", f"sum(floe_ingress_stopped_chains{{{BY_TARGET}}})"),
        stat_panel("targets stopped", f"sum(floe_ingress_stopped{{{BY_TARGET}}})"),
        stat_panel("sequences late", f"sum(floe_ingress_late_sequences{{{BY_TARGET}}})"),
        Panel("behind the source", {f"floe_ingress_source_lag_sequences{{{BY_BOTH}}}": COPY_LEGEND}, width=12),
        Panel(
            "since the last heartbeat",
            {f"time() - floe_ingress_site_alive_timestamp_seconds{{{BY_SITE}}}": "{{site}}"},
            "s",
            width=12,
        ),
    ),
    "Egress": (
        stat_panel("chains stopped", f"sum(floe_egress_stopped{{{BY_SITE}}})"),
        stat_panel("chains waiting", f"sum(floe_egress_waiting{{{BY_SITE}}})"),
        stat_panel("chains stalled", f"sum(floe_egress_stalled{{{BY_SITE}}})"),
        stat_panel("leases held", f"sum(floe_egress_lease_held{{{BY_SITE}}})", red_from=None),
        stat_panel("sequences lost", f"sum(floe_egress_lost_sequences{{{BY_SITE}}})"),
        stat_panel("damaged segments", f"sum(floe_egress_damaged_segments{{{BY_SITE}}})"),
        Panel(
            "until the source expires",
            {f"min by (site, feed, partition) (floe_egress_expiry_seconds{{{BY_SITE}}})": CHAIN_LEGEND},
            "s",
        ),
        Panel(
            "not archived",
            {f"floe_egress_source_sequence{{{BY_SITE}}} - floe_egress_end_sequence{{{BY_SITE}}}": CHAIN_LEGEND},
        ),
        Panel(
            "since the last segment",
            {f"time() - floe_egress_put_last_success_timestamp_seconds{{{BY_SITE}}}": CHAIN_LEGEND},
            "s",
        ),
        Panel(
            "messages archived", {rate("egress_messages_total", BY_SITE, "site, feed, partition"): CHAIN_LEGEND}, "cps"
        ),
        Panel(
            "raw and stored bytes",
            {
                rate("egress_raw_bytes_total", BY_SITE, "site"): "{{site}} raw",
                rate("egress_stored_bytes_total", BY_SITE, "site"): "{{site}} stored",
            },
            "Bps",
        ),
        Panel("open segment, messages", {f"floe_egress_open_segment_messages{{{BY_SITE}}}": CHAIN_LEGEND}),
        Panel("open segment, bytes", {f"floe_egress_open_segment_bytes{{{BY_SITE}}}": CHAIN_LEGEND}, "bytes"),
        Panel("open segment, age", {f"floe_egress_open_segment_age_seconds{{{BY_SITE}}}": CHAIN_LEGEND}, "s"),
        Panel(
            "received bytes: archived, and left out by reason",
            {
                rate("egress_received_bytes_total", BY_SITE, "site"): "{{site}} received",
                rate("egress_raw_bytes_total", BY_SITE, "site"): "{{site}} archived",
                rate("egress_left_out_bytes_total", BY_SITE, "site, reason"): "{{site}} {{reason}}",
            },
            "Bps",
        ),
        Panel("left out, by reason", {rate("egress_left_out_total", BY_SITE, "reason"): "{{reason}}"}, "cps"),
        Panel(
            "time of a put (95 %)", {quantile("egress_put_seconds", BY_SITE, "site, feed"): "{{site}}/{{feed}}"}, "s"
        ),
        Panel(
            "segments closed, by reason", {rate("egress_segments_closed_total", BY_SITE, "reason"): "{{reason}}"}, "cps"
        ),
        Panel(
            "memory and spool",
            {
                "floe_egress_memory_bytes": f"{INSTANCE_LEGEND} memory",
                "floe_egress_memory_limit_bytes": f"{INSTANCE_LEGEND} limit",
                "floe_egress_spool_bytes": f"{INSTANCE_LEGEND} spool",
            },
            "bytes",
        ),
        Panel("advisories", {rate("egress_advisories_total", BY_SITE, "event, result"): "{{event}} {{result}}"}, "cps"),
        Panel("advisories waiting to be stored", {f"floe_egress_advisories_waiting{{{BY_SITE}}}": CHAIN_LEGEND}),
        Panel("values that samplers know", {f"floe_egress_tracked_values{{{BY_SITE}}}": CHAIN_LEGEND}),
        Panel(
            "snapshots of samplers, and samplers rebuilt",
            {
                rate("egress_snapshots_total", BY_SITE, "result"): "{{result}}",
                rate("egress_sampler_rebuilt_total", BY_SITE, "reason"): "rebuilt: {{reason}}",
            },
            "cps",
        ),
        Panel(
            "captures of configuration, consumers and deletions",
            {rate("egress_captures_total", BY_SITE, "what, result"): "{{what}} {{result}}"},
            "cps",
        ),
        Panel("doubts about a reader", {rate("egress_doubts_total", BY_SITE, "reason"): "{{reason}}"}, "cps"),
        Panel(
            "anomalies of the stream",
            {
                f"floe_egress_unverified{{{BY_SITE}}}": f"{CHAIN_LEGEND} nothing left to compare",
                f"floe_egress_created_drifted{{{BY_SITE}}}": f"{CHAIN_LEGEND} other creation time",
                f"floe_egress_unmatched_messages{{{BY_SITE}}}": "{{site}}/{{feed}} in no partition",
                f"sum by (site) (floe_egress_source_gone{{{BY_SITE}}})": "{{site}} streams that do not exist",
                f"max by (site) (floe_egress_uncovered_streams{{{BY_SITE}}})": "{{site}} streams in no feed",
                f"increase(floe_egress_interest_lapsed_total{{{BY_SITE}}}[$__rate_interval])": f"{CHAIN_LEGEND} lapsed",
            },
        ),
        Panel(
            "heartbeats",
            {
                rate("egress_heartbeats_total", BY_SITE, "site"): "{{site}} heartbeats",
                rate("egress_heartbeat_errors_total", BY_SITE, "site"): "{{site}} heartbeats not stored",
                rate("egress_alive_errors_total", BY_SITE, "site"): "{{site}} process heartbeats not stored",
            },
            "cps",
        ),
    ),
    "Archive and store": (
        Panel(
            "end of the archive",
            {f"max by (site, feed, partition) (floe_egress_end_sequence{{{BY_SITE}}})": CHAIN_LEGEND},
        ),
        Panel("segments put", {rate("egress_segments_total", BY_SITE, "site, feed"): "{{site}}/{{feed}}"}, "cps"),
        Panel(
            "damaged, or not read back",
            {
                rate("ingress_damaged_segments_total", BY_TARGET, "target"): "{{target}} damaged",
                rate("segment_read_back_failures_total", BY_SITE, "site, feed"): "{{site}}/{{feed}} not read back",
            },
            "cps",
        ),
        Panel("calls of the store", {rate("store_requests_total", "", "op"): "{{op}}"}, "reqps"),
        Panel(
            "calls that failed",
            {rate("store_requests_total", 'result!="ok"', "op, result"): "{{op}} {{result}}"},
            "reqps",
        ),
        Panel("time of a call (95 %)", {quantile("store_request_seconds", "", "op"): "{{op}}"}, "s"),
    ),
    "Ingress": (
        Panel("behind the archive, time", {f"floe_ingress_lag_seconds{{{BY_BOTH}}}": COPY_LEGEND}, "s"),
        Panel("behind the archive, messages", {f"floe_ingress_lag_messages{{{BY_TARGET}}}": "{{target}}"}),
        Panel("waiting for a hole", {f"floe_ingress_waiting_seconds{{{BY_BOTH}}}": COPY_LEGEND}, "s"),
        Panel(
            "messages delivered",
            {rate("ingress_messages_total", BY_BOTH, "target, site, feed"): "{{target}} {{site}}/{{feed}}"},
            "cps",
        ),
        Panel("bytes delivered", {rate("ingress_bytes_total", BY_TARGET, "target"): "{{target}}"}, "Bps"),
        Panel(
            "time of an intent (95 %)", {quantile("ingress_publish_seconds", BY_TARGET, "target"): "{{target}}"}, "s"
        ),
        Panel("intents", {rate("ingress_intents_total", BY_TARGET, "target, result"): "{{target}} {{result}}"}, "cps"),
        Panel("intents open", {f"floe_ingress_intent_open{{{BY_TARGET}}}": "{{target}}"}),
        Panel("foreign messages", {rate("ingress_foreign_messages_total", BY_TARGET, "target"): "{{target}}"}, "cps"),
        Panel("notifications", {rate("ingress_events_total", "", "source, result"): "{{source}} {{result}}"}, "cps"),
        Panel(
            "store errors: listings, positions",
            {
                rate("ingress_store_errors_total", BY_TARGET, "target"): "{{target}} listings",
                rate("ingress_positions_errors_total", BY_TARGET, "target"): "{{target}} positions",
            },
            "cps",
        ),
        Panel(
            "refused and unclear",
            {
                rate("ingress_refused_batches_total", BY_TARGET, "target, err_code"): "{{target}} {{err_code}}",
                rate("ingress_unclear_outcomes_total", BY_TARGET, "target"): "{{target}} unclear",
            },
            "cps",
        ),
        Panel(
            "lost, parked, paused",
            {
                f"increase(floe_ingress_lost_sequences_total{{{BY_TARGET}}}[$__rate_interval])": "{{target}} lost",
                f"floe_ingress_parked_waiting{{{BY_TARGET}}}": "{{target}} parked",
                f"floe_ingress_paused_chains{{{BY_TARGET}}}": "{{target}} paused chains",
                f"increase(floe_ingress_segments_behind_gaps_total{{{BY_TARGET}}}[$__rate_interval])": "{{target}} gap",
            },
        ),
    ),
    "Compaction": (
        stat_panel(
            "since the last success",
            "max(time() - floe_compaction_last_success_timestamp_seconds)",
            unit="s",
            red_from=86400,
        ),
        stat_panel("failures of the last run", "sum(floe_compaction_failures)"),
        stat_panel("segments merged", "sum(floe_compaction_merged_segments)", red_from=None),
        stat_panel("segments written", "sum(floe_compaction_output_segments)", red_from=None),
        stat_panel("segments deleted", "sum(floe_compaction_deleted_segments)", red_from=None),
        stat_panel("duration", "max(floe_compaction_duration_seconds)", unit="s", red_from=None),
        stat_panel("chains that differ from a copy", "sum(floe_compare_differs)"),
        stat_panel("retention held back", "sum(floe_compaction_retention_held_bytes)", unit="bytes"),
        Panel(
            "bytes read, written, deleted",
            {
                "floe_compaction_read_bytes": "read",
                "floe_compaction_written_bytes": "written",
                "floe_compaction_deleted_bytes": "deleted",
                "floe_compaction_expired_bytes": "expired",
            },
            "bytes",
            width=24,
        ),
    ),
    "Processes": (
        Panel("versions", {"sum by (version, python) (floe_build_info)": "{{version}}, Python {{python}}"}),
        Panel("memory", {'process_resident_memory_bytes{job=~"floe.*"}': INSTANCE_LEGEND}, "bytes"),
        Panel(
            "processor",
            {'rate(process_cpu_seconds_total{job=~"floe.*"}[$__rate_interval])': INSTANCE_LEGEND},
            "percentunit",
        ),
        Panel("connections to NATS", {"floe_nats_connected": INSTANCE_LEGEND}),
        Panel(
            "reachable",
            {
                "floe_egress_nats_reachable": "egress {{instance}} NATS",
                "floe_egress_store_reachable": "egress {{instance}} store",
                "floe_ingress_nats_reachable": "ingress {{instance}} NATS",
                "floe_ingress_store_reachable": "ingress {{instance}} store",
            },
        ),
        Panel("reconnects", {"increase(floe_nats_reconnects_total[$__rate_interval])": INSTANCE_LEGEND}),
        Panel(
            "members and leases",
            {
                "floe_egress_members": "{{site}} {{instance}} members",
                "floe_egress_leases_held": "{{site}} {{instance}} leases",
                "floe_ingress_members": "ingress {{instance}} members",
                "floe_ingress_leases_held": "ingress {{instance}} leases",
            },
        ),
        Panel(
            "leases that changed hands",
            {
                rate("egress_hand_overs_total", BY_SITE, "site, reason"): "{{site}} {{reason}}",
                rate("egress_take_overs_total", BY_SITE, "site"): "{{site}} taken over",
                rate("ingress_hand_overs_total", "", "reason"): "ingress {{reason}}",
                rate("ingress_take_overs_total"): "ingress taken over",
            },
            "cps",
        ),
        Panel(
            "workers",
            {
                "floe_egress_worker_running": "{{instance}} {{worker}} runs",
                "increase(floe_egress_worker_restarts_total[$__rate_interval])": "{{instance}} {{worker}} restarted",
            },
        ),
        Panel("unexpected errors", {rate("unexpected_errors_total", "", "part"): "{{part}}"}, "cps"),
        Panel("log lines dropped", {"rate(floe_log_lines_dropped_total[$__rate_interval])": INSTANCE_LEGEND}, "cps"),
        Panel(
            "since the last answer of the store",
            {
                "time() - floe_egress_store_last_success_timestamp_seconds": "egress {{instance}}",
                "time() - floe_ingress_store_last_success_timestamp_seconds": "ingress {{instance}}",
            },
            "s",
        ),
    ),
}

#: Metrics that no panel shows, by reason.
METRICS_WITHOUT_PANEL: Mapping[str, Sequence[str]] = {
    "a panel shows what it is a part or a limit of": (
        "floe_egress_share",
        "floe_ingress_share",
        "floe_ingress_lease_held",
        "floe_egress_heartbeats_leader",
        "floe_egress_advisories_failing",
        "floe_ingress_parked_messages_total",
        "floe_compaction_merged_rows",
        "floe_compaction_expired_segments",
    ),
    "a time that an alert or floe check reads; a panel shows the failure beside it": (
        "floe_egress_nats_last_success_timestamp_seconds",
        "floe_ingress_nats_last_success_timestamp_seconds",
        "floe_egress_alive_last_success_timestamp_seconds",
        "floe_ingress_alive_last_success_timestamp_seconds",
        "floe_egress_source_last_success_timestamp_seconds",
        "floe_egress_capture_last_success_timestamp_seconds",
        "floe_ingress_lag_last_success_timestamp_seconds",
        "floe_ingress_publish_last_success_timestamp_seconds",
        "floe_ingress_positions_put_timestamp_seconds",
        "floe_compaction_last_run_timestamp_seconds",
        "floe_compare_last_run_timestamp_seconds",
        "floe_credential_expiry_timestamp_seconds",
    ),
    "a fact that seldom changes; floe status shows it": (
        "floe_egress_incarnation",
        "floe_egress_recreated_total",
        "floe_egress_source_timestamp_seconds",
        "floe_egress_end_timestamp_seconds",
        "floe_ingress_publisher",
        "floe_ingress_target_sequence",
        "floe_ingress_matched_feeds",
        "floe_ingress_untaken_feeds",
    ),
    "of use to whoever tunes one feed": (
        "floe_egress_forced_copies_total",
        "floe_egress_capture_bytes_total",
        "floe_egress_sample_keys_missing_total",
        "floe_egress_snapshot_seconds",
        "floe_egress_heartbeat_seconds",
    ),
}

VARIABLES = {
    "site": 'label_values({__name__=~"floe_egress_stopped|floe_ingress_site_silent"}, site)',
    "target": "label_values(floe_ingress_stopped, target)",
}


def dashboard() -> dict[str, Any]:
    """Return the dashboard in the form that Grafana imports."""
    return {
        "uid": "floe",
        "title": "Floe",
        "tags": ["floe"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "1m",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [*_variables()]},
        "panels": [*_panels()],
    }


def render() -> str:
    """Return the content of the file."""
    return json.dumps(dashboard(), indent=1, sort_keys=True) + "\n"


DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    for name, query in VARIABLES.items():
        yield {
            "name": name,
            "label": name,
            "type": "query",
            "datasource": DATASOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }


def _panels() -> Iterator[dict[str, Any]]:
    """Yield the rows and their panels from left to right, each row of panels as high as its highest."""
    number = y = 0
    for title, panels in ROWS.items():
        number += 1
        place = {"x": 0, "y": y, "w": GRID_WIDTH, "h": 1}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        x, y, height = 0, y + 1, 0
        for each in panels:
            if x + each.width > GRID_WIDTH:
                x, y, height = 0, y + height, 0
            number, height = number + 1, max(height, _height(each))
            yield _panel(each, number, {"x": x, "y": y, "w": each.width, "h": _height(each)})
            x += each.width
        y += height


def _height(panel: Panel) -> int:
    return PANEL_HEIGHT // 2 if panel.kind == "stat" else PANEL_HEIGHT


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.red_from is not None:
        steps.append({"color": "red", "value": panel.red_from})
    is_stat = panel.kind == "stat"
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}}
            | ({} if is_stat else {"min": 0}),
            "overrides": [],
        },
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}} if is_stat else {"legend": {"displayMode": "list"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(panel.expressions.items())
        ],
    }


if __name__ == "__main__":
    DASHBOARD_PATH.write_text(render())
