"""Calling kernels: argument checks of the native objects, programs, threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from kvmesh.kernels import _native, ops
from kvmesh.kernels.library import load_cpu


def test_kernels_check_their_arguments():
    kernel = load_cpu().kernel("silu_and_mul")
    with pytest.raises(TypeError, match="takes 7 positional arguments, 1 given"):
        kernel(0)
    with pytest.raises(TypeError):
        kernel(0, 0, 0, 0, 0, 0.5, 0)
    assert kernel(None, 0, None, 0, 0, 0, 0) == 0
    assert kernel(None, 0, None, 0, 0, 0, 99) == -1


def test_a_float_argument_may_be_an_integer():
    x, weight, out = torch.full((1, 4), 2.0), torch.ones(4), torch.empty(1, 4)
    ops.rms_norm(out, x, weight, 12)
    assert out[0].tolist() == [0.5] * 4


def test_a_program_repeats_its_calls_on_new_contents():
    x, weight, normed, gated = torch.randn(3, 8), torch.randn(8), torch.empty(3, 8), torch.empty(3, 4)
    program = ops.Program()
    with program.record():
        ops.rms_norm(normed, x, weight, 1e-5)
        ops.silu_and_mul(gated, normed)
    assert len(program) == 2
    for _ in range(2):
        x.copy_(torch.randn(3, 8))
        program.run()
        expected_normed, expected = torch.empty(3, 8), torch.empty(3, 4)
        ops.rms_norm(expected_normed, x, weight, 1e-5)
        ops.silu_and_mul(expected, expected_normed)
        assert torch.equal(gated, expected)
    assert len(program) == 2


def test_a_program_stops_at_the_call_that_fails(make_pages):
    case = make_pages([4], kv_heads=1, head_dim=16, tokens_per_block=4, dtype=torch.float32)
    q, out, x = torch.randn(1, 1, 16), torch.empty(1, 1, 16), torch.randn(1, 4)
    starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    normed, weight = torch.zeros(1, 4), torch.ones(4)
    program = ops.Program()
    with program.record():
        ops.paged_attention(out, q, case.kv, case.block_tables, starts, lens, 0.25)
        ops.rms_norm(normed, x, weight, 1e-5)
    normed.zero_()
    lens[0] = 0
    with pytest.raises(ops.KernelError, match="paged_attention"):
        program.run()
    assert not normed.any()


def test_recording_is_of_one_thread_and_does_not_nest():
    weight, x = torch.ones(4), torch.ones(1, 4)
    program, other = ops.Program(), ops.Program()

    def elsewhere():
        ops.rms_norm(torch.empty(1, 4), x, weight, 1e-5)

    with program.record():
        with pytest.raises(RuntimeError, match="already"), other.record():
            pass
        with pytest.raises(RuntimeError, match="recorded"):
            program.run()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert len(program) == 0
    with pytest.raises(RuntimeError, match="not recording"):
        _native.Program().stop()


def test_concurrent_calls_do_not_disturb_each_other():
    """Threads share the pool: one has it, the others work by themselves."""
    ops.set_num_threads(3)
    source = np.random.default_rng(0).integers(0, 256, (8, 1 << 19), dtype=np.uint8)
    ids = np.array([6, 1, 4], dtype=np.int32)
    failures = []

    def move():
        run = np.empty((3, 1 << 19), dtype=np.uint8)
        for _ in range(20):
            run.fill(0)
            ops.gather_pages(run.ctypes.data, source.ctypes.data, ids, 1 << 19)
            if not np.array_equal(run, source[ids]):
                failures.append("wrong bytes")

    threads = [threading.Thread(target=move) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_the_number_of_threads_can_change_between_calls():
    x, weight, out = torch.randn(2000, 256), torch.randn(256), torch.empty(2000, 256)
    ops.set_num_threads(1)
    expected = torch.empty_like(out)
    ops.rms_norm(expected, x, weight, 1e-5)
    for count in (2, 5, 1, 3, 2):
        ops.set_num_threads(count)
        assert ops.get_num_threads() == count
        out.zero_()
        ops.rms_norm(out, x, weight, 1e-5)
        assert torch.equal(out, expected)
