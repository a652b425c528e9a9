"""`deploy/envoy`: valid by Envoy's own message types, and each request goes by the key that `deploy/haproxy` would take."""

from __future__ import annotations

import copy
import functools
import importlib
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from tilewire.service.config.settings import Settings
from tilewire.service.gateway.connection.limits import MAX_HEAD_BYTES

FILE = Path(__file__).resolve().parents[2] / "deploy" / "envoy" / "envoy.yaml"
# The last four are types behind an "@type": the package finds those that are imported.
MODULES = (
    "config.bootstrap",
    "config.cluster",
    "extensions.filters.http.router",
    "extensions.filters.network.http_connection_manager",
    "extensions.retry.host.previous_hosts",
    "extensions.upstreams.http",
)
# The package writes this field as `…5_xx` when it reads JSON, and then does not find it.
LOST = "enforcing_consecutive_5xx"
# Envoy's expressions are RE2's: these are not among them.
NOT_RE2 = re.compile(r"\(\?[=!<]|\\[1-9]")


@functools.cache
def types() -> tuple[Any, Any]:
    """Envoy's bootstrap and outlier detection. Importing them takes most of a second, and other workers need not."""
    # The package's own decorators are deprecated.
    with warnings.catch_warnings(action="ignore"):
        bootstrap, cluster, *_ = (importlib.import_module(f"envoy_data_plane.envoy.{name}.v3") for name in MODULES)
    return bootstrap.Bootstrap, cluster.OutlierDetection


def document() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return loaded


def readable(document: dict[str, Any]) -> dict[str, Any]:
    """The document without the key that the package cannot read."""
    document = copy.deepcopy(document)
    for cluster in document["static_resources"]["clusters"]:
        cluster["outlier_detection"].pop(LOST, None)
    return document


def manager() -> dict[str, Any]:
    (listener,) = document()["static_resources"]["listeners"]
    found: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return found


def routes() -> list[dict[str, Any]]:
    (host,) = manager()["route_config"]["virtual_hosts"]
    found: list[dict[str, Any]] = host["routes"]
    return found


def matches(match: dict[str, Any], path: str, query: dict[str, str], headers: dict[str, str]) -> bool:
    def is_like(value: str | None, matcher: dict[str, Any]) -> bool:
        if value is None or matcher.get("present_match"):
            return value is not None
        expected = matcher["string_match"]
        if "exact" in expected:
            return value == str(expected["exact"])
        return re.fullmatch(expected["safe_regex"]["regex"], value) is not None

    if "safe_regex" in match:
        return re.fullmatch(match["safe_regex"]["regex"], path) is not None
    return (
        path.startswith(match["prefix"])
        and all(is_like(query.get(one["name"]), one) for one in match.get("query_parameters", ()))
        and all(is_like(headers.get(one["name"]), one) for one in match.get("headers", ()))
    )


def routed(target: str, headers: dict[str, str], method: str = "POST") -> tuple[str, str | None, bool]:
    """Cluster, key, and whether a request may be repeated, by the first route that matches."""
    path, _, query_text = target.partition("?")
    headers = {":path": target, ":method": method, **headers}
    query = dict(pair.split("=", 1) for pair in query_text.split("&") if pair)
    route = next(one for one in routes() if matches(one["match"], path, query, headers))
    action = route.get("route", {"cluster": "none"})
    key = None
    for policy in action.get("hash_policy", ()):
        source = policy["header"]
        value = headers[source["header_name"]]
        rewrite = source.get("regex_rewrite")
        key = re.sub(rewrite["pattern"]["regex"], rewrite["substitution"], value) if rewrite else value
    return action["cluster"], key, "retry_policy" in action


@pytest.mark.slow
def test_it_is_valid_to_the_last_key() -> None:
    bootstrap_type, outlier_detection = types()
    bootstrap = bootstrap_type.from_dict(readable(document()))
    assert {cluster.name for cluster in bootstrap.static_resources.clusters} == {"residents", "any"}
    assert LOST in outlier_detection.__dataclass_fields__


@pytest.mark.parametrize("place", ["cluster", "route"])
def test_an_unknown_key_is_refused(place: str) -> None:
    wrong = readable(document())
    if place == "cluster":
        wrong["static_resources"]["clusters"][0]["ring_hash"] = {}
    else:
        connections = wrong["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        connections["route_config"]["virtual_hosts"][0]["routes"][-1]["route"]["hash_polici"] = []
    with pytest.raises(KeyError, match="Unknown field"):
        types()[0].from_dict(wrong)


@pytest.mark.parametrize(
    ("target", "headers", "expected"),
    [
        ("/v1/tensors/weights/w1", {}, ("residents", "weights/w1", True)),
        ("/v1/matmul?b=@weights/w1", {}, ("residents", "weights/w1", True)),
        ("/v1/matmul?activation=gelu&b=%40weights/w1&out_dtype=float32", {}, ("residents", "weights/w1", True)),
        ("/v1/add?a=@x&alpha=2", {}, ("residents", "x", True)),
        ("/v1/matmul?a=@x&b=@y", {}, ("residents", "y", True)),
        ("/v1/programs/mlp?x=@y", {}, ("residents", "mlp", True)),
        ("/v1/matmul?b=@w&store=@y", {}, ("residents", "w", False)),
        ("/v1/softmax?store=@y", {}, ("any", None, False)),
        ("/v1/matmul?b=@w", {"x-tilewire-key": "group"}, ("residents", "group", True)),
        ("/v1/matmul?b=@w&store=@y", {"x-tilewire-key": "group"}, ("residents", "group", False)),
        ("/v1/matmul?b=@w&%73t%6Fr%65=@y", {}, ("residents", "w", False)),
        ("/v1/add?a=@x&store=@y", {}, ("residents", "x", False)),
        ("/v1/add?a=@store=x", {}, ("residents", "store=x", True)),
        ("/v2/models/matmul/infer", {"x-tilewire-key": "w"}, ("residents", "w", False)),
        ("/v2/models/matmul/infer", {}, ("any", None, False)),
        ("/v1/matmul", {}, ("any", None, True)),
        ("/v1/tensors", {}, ("any", None, True)),
        ("/metrics", {}, ("none", None, False)),
        ("/metrics?x=1", {"x-tilewire-key": "w"}, ("none", None, False)),
        ("/%6detrics", {}, ("none", None, False)),
        ("/%6Detric%73", {}, ("none", None, False)),
        ("/%6d%65%74%72%69%63%73", {}, ("none", None, False)),
        # The service has nothing there.
        ("/%256detrics", {}, ("any", None, True)),
        ("/metrics-of-mine", {}, ("any", None, True)),
    ],
)
def test_a_request_goes_by_the_resident_that_it_names(
    target: str, headers: dict[str, str], expected: tuple[str, str | None, bool]
) -> None:
    assert routed(target, headers) == expected


def test_reads_of_v2_are_repeated() -> None:
    assert routed("/v2/models/matmul", {}, "GET") == ("any", None, True)
    assert routed("/v2/models/matmul", {"x-tilewire-key": "w"}, "GET") == ("residents", "w", True)


def test_only_reads_and_products_are_repeated() -> None:
    policies = [route["route"]["retry_policy"] for route in routes() if "retry_policy" in route.get("route", {})]
    for policy in policies:
        methods = {one["string_match"]["exact"] for one in policy["retriable_request_headers"]}
        assert methods == {"GET", "HEAD", "POST"}
        assert policy["retriable_status_codes"] == [503]


def test_its_expressions_are_those_of_re2() -> None:
    expressions = re.findall(r"regex: ['\"](.+?)['\"]\}", FILE.read_text(encoding="utf-8"))
    assert expressions
    for expression in expressions:
        re.compile(expression)
        assert not NOT_RE2.search(expression)


def test_both_clusters_have_the_same_hosts_and_checks() -> None:
    one, other = document()["static_resources"]["clusters"]
    for key in ("load_assignment", "health_checks", "outlier_detection", "typed_extension_protocol_options"):
        assert one[key] == other[key]
    assert one["health_checks"][0]["http_health_check"]["path"] == "/readyz"
    # 504 and 507 are answers of a host that works.
    assert one["outlier_detection"][LOST] == 0


def test_idle_connections_are_closed_by_envoy_first() -> None:
    for cluster in document()["static_resources"]["clusters"]:
        (options,) = cluster["typed_extension_protocol_options"].values()
        kept_s = options["common_http_protocol_options"]["idle_timeout"]
        assert float(kept_s.removesuffix("s")) < Settings.model_fields["keep_alive_s"].default


def test_paths_stay_as_they_are_and_heads_are_as_long_as_the_service_takes() -> None:
    found = manager()
    assert not found["normalize_path"]
    assert not found["merge_slashes"]
    assert found["path_with_escaped_slashes_action"] == "KEEP_UNCHANGED"
    assert found["max_request_headers_kb"] * 1024 == MAX_HEAD_BYTES


def test_what_envoy_says_by_itself_is_json() -> None:
    local = manager()["local_reply_config"]
    assert local["body_format"]["content_type"] == "application/problem+json"
    form = local["body_format"]["json_format"]
    assert form.keys() == {"type", "title", "status", "detail", "error"}
    # Alone in its string it stays a number.
    assert form["status"] == "%RESPONSE_CODE%"
    (mapper,) = local["mappers"]
    assert mapper["filter"]["status_code_filter"]["comparison"]["value"]["default_value"] == 503
    assert mapper["headers_to_add"] == [{"header": {"key": "retry-after", "value": "1"}}]
