"""Names the gRPC services and their methods, as they stand in paths. A table."""

from __future__ import annotations

SERVICE = "inference.GRPCInferenceService"
HEALTH_SERVICE = "grpc.health.v1.Health"
# Their messages are the same; grpcurl tries the newer one first.
REFLECTION_SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")

INFER, STREAM_INFER = f"/{SERVICE}/ModelInfer", f"/{SERVICE}/ModelStreamInfer"
# Probes carry no keys.
HEALTH_PATHS = frozenset(
    {
        f"/{SERVICE}/ServerLive",
        f"/{SERVICE}/ServerReady",
        f"/{HEALTH_SERVICE}/Check",
        f"/{HEALTH_SERVICE}/List",
        f"/{HEALTH_SERVICE}/Watch",
    }
)
# Reflection describes the API, as `/openapi.json` does.
REFLECTION_PATHS = frozenset(f"/{name}/ServerReflectionInfo" for name in REFLECTION_SERVICES)
