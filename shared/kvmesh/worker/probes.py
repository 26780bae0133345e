"""The probe behind ``/health_generate``: an engine really generates one token."""

from __future__ import annotations

import contextlib
import uuid

import anyio

from kvmesh.engine.client import EngineClient
from kvmesh.protocol.engine import Generate
from kvmesh.protocol.errors import unavailable
from kvmesh.protocol.sampling import SamplingParams

__all__ = ["generate_probe"]

PROBE_TIMEOUT_S = 30.0


async def generate_probe(engine: EngineClient) -> int:
    """Tokens that an engine has just generated for a probe.

    Raises:
        ApiError: 503, none within the time for it, or the engine is gone.
    """
    probe = Generate(
        request_id=f"health-{uuid.uuid4().hex}",
        prompt_token_ids=bytes(4),
        sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        deadline_s=PROBE_TIMEOUT_S,
        probe=True,
    )
    tokens = 0
    with anyio.move_on_after(PROBE_TIMEOUT_S):
        async with contextlib.aclosing(engine.generate(probe)) as outputs:
            async for output in outputs:
                tokens += len(output.token_ids)
    if not tokens:
        raise unavailable(f"The engine has not generated a token within {PROBE_TIMEOUT_S:g} s.", code="engine_busy")
    return tokens
