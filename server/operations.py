"""Routes for those who run the server: readiness, load, and requests that are to end."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from framework import EngineDead

from . import shapes
from .generation import Serving
from .openai import Route
from .schemas import AbortRequest


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(route_class=Route, tags=["operations"], responses=shapes.ERRORS)
    client = serving.client

    async def ready() -> Response:
        """Whether further requests should come: 200, or else 503."""
        unfit = client.dead or client.stalled or client.draining
        if unfit is not None:
            raise EngineDead(unfit)
        return Response()

    async def load() -> Response:
        """How many responses are unfinished."""
        return JSONResponse({"server_load": client.load})

    async def abort(body: AbortRequest, request: Request) -> Response:
        """End requests by their ids."""
        # With API keys each caller ends its own requests; those of others are as if they were not there.
        tenant = getattr(request.state, "tenant", None)
        return JSONResponse({"aborted": client.cancel(frozenset(body.request_ids), tenant)})

    routes.add_api_route("/ready", ready, methods=["GET"], response_class=Response)
    routes.add_api_route("/load", load, methods=["GET"], response_model=shapes.Load)
    routes.add_api_route("/abort_requests", abort, methods=["POST"], response_model=shapes.Aborted)
    return routes
