"""The port for scrapers and probes inside a cluster: plain HTTP, no user's key, and nothing but numbers and states."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.types import ASGIApp

from server.calls import Calls
from server.guards import METRICS_PATH, KeyMiddleware
from server.http_api import Routes
from server.keys import Doors
from server.operations import Operations


def metrics_app(calls: Calls, operations: Operations) -> ASGIApp:
    """`/metrics`, `/health` and `/ready`; the scrapers' key opens the first, if they have one."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    routes = Routes(calls, operations.exposition)
    app.add_api_route(METRICS_PATH, routes.metrics, methods=["GET"])
    app.add_api_route("/health", routes.health, methods=["GET"])
    app.add_api_route("/ready", routes.ready, methods=["GET"])
    return KeyMiddleware(app, Doors(users=None, scrapers=operations.doors.scrapers))
