"""A whole round compiled for an H200: caches updated in place, a draft loop that is one CUDA graph,
no spills, no launch too many."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from dataclasses import dataclass, replace

import jax.numpy as jnp
import pytest

from jaxspec.config import AttentionConfig, CacheGroup, Ops, RoundConfig
from jaxspec.tools.benchmark.dimensions import MODELS, draft_config
from pallas_kernels import rms_norm
from pallas_kernels.matmul import shares_norm
from tests.support import h200
from tests.support.h200_round import COPIES_ON_STREAMS, Compiled, body_of, compile_round

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(h200.unavailable() is not None, reason=str(h200.unavailable())),
]

BATCH, PAGES = 4, 12
GROUP = CacheGroup(64, 2048)


@dataclass(frozen=True)
class Round:
    """layers: of the target, cut down where the depth says nothing more."""

    model: str
    num_speculative_tokens: int
    sampled: bool
    truncated: bool = False
    layers: int = 3
    num_rounds: int = 1  # of the program
    batch: int = BATCH
    pages: int = PAGES
    fp8: bool = False  # keys and values
    scored: bool = False  # with log-probabilities


ROUNDS = {
    "8b, K 3, sampled": Round("llama-3-8b", 3, sampled=True),
    "8b, K 5, greedy": Round("llama-3-8b", 5, sampled=False),
    "smollm2, K 3, greedy": Round("smollm2-135m", 3, sampled=False),
    "smollm2, K 5, sampled": Round("smollm2-135m", 5, sampled=True),
    "smollm2, K 5, sampled, top-k and top-p": Round(
        "smollm2-135m", 5, sampled=True, truncated=True
    ),
    "smollm2, K 3, sampled, 4 rounds": Round("smollm2-135m", 3, sampled=True, num_rounds=4),
}
TRUNCATION_TRIPS = [8, 8]  # 4 of 32 bits a pass: one search for top-k, one for top-p
LARGE_BATCH = Round("llama-3-8b", 3, sampled=True, batch=64)
LONG_CONTEXT = Round("llama-3-8b", 3, sampled=True, batch=16, pages=512, fp8=True)
STEP_METADATA = (32, 0, 0)  # its stack is libdevice's, for the cosine of an angle above 105,615
# Of 16 rows: norm, qkv, rotate and write, attention, o + residual, norm, gate_up, down + residual.
# Products of narrow rows do the norms.
LAUNCHES_PER_LAYER = {"llama-3-8b": 8, "smollm2-135m": 6}
# Counter, metadata, embedding and norms, seven of the layer, norm, head, argmax's two, the token's
# id for the target, its column.
LAUNCHES_OF_A_DRAFT_STEP = {"8b, K 5, greedy": 16}


def configured(case: Round) -> RoundConfig:
    dimensions = MODELS[case.model]
    dimensions = replace(
        dimensions, target=replace(dimensions.target, num_layers=case.layers), aux_layers=(0, 1, 2)
    )
    every = Ops(**dict.fromkeys(Ops().names(), "mosaic_gpu"))
    narrow = (
        rms_norm.unsupported(dimensions.target.hidden_size, jnp.bfloat16) is not None
    )  # then an engine's norms are XLA's
    return RoundConfig(
        target=dimensions.target,
        target_groups=(GROUP,),
        draft=draft_config(dimensions, "eagle3"),
        draft_groups=(GROUP,),
        num_speculative_tokens=case.num_speculative_tokens,
        rule="probabilistic",
        sampled=case.sampled,
        processors=frozenset({"truncation"} if case.truncated else ()),
        logprobs=case.scored,
        ops=replace(every, rms_norm="reference") if narrow else every,
    )


@functools.cache
def compiled(case: Round) -> Compiled:
    return compile_round(
        configured(case),
        case.batch,
        case.pages,
        num_rounds=case.num_rounds,
        cache_dtype=jnp.float8_e4m3fn if case.fp8 else jnp.bfloat16,
    )


@pytest.fixture(params=ROUNDS)
def case(request: pytest.FixtureRequest) -> Compiled:
    return compiled(ROUNDS[request.param])


def cache_shape(cfg: RoundConfig) -> tuple[int, ...]:
    attention = cfg.target.attention
    assert isinstance(attention, AttentionConfig)
    return (BATCH * PAGES, GROUP.block_size, attention.num_kv_heads, attention.head_dim)


def test_donated_caches_are_updated_in_place(case: Compiled) -> None:
    shape = re.escape(f"bf16[{','.join(map(str, cache_shape(case.cfg)))}]")
    made = re.findall(
        rf"= \(?[^=(]*{shape}[^=]*? "
        r"(?:copy|copy-start|fusion|transpose|scatter|dynamic-update-slice)\(.*",
        case.hlo,
    )
    assert not made
    caches = 2 * (case.cfg.target.num_layers + case.cfg.draft.num_layers)
    assert case.aliased >= caches * math.prod(cache_shape(case.cfg)) * 2  # bytes of bfloat16


def test_the_draft_loop_is_one_while_of_k_minus_1_trips(case: Compiled) -> None:
    """A known count, as that of the rounds: the host does not read the loop's condition back, so it
    runs ahead of the device."""
    loops = [line for line in case.hlo.splitlines() if re.search(r" while\(", line)]
    trips = [
        int(n) for line in loops for n in re.findall(r'"known_trip_count":{"n":"(\d+)"}', line)
    ]
    assert len(loops) == len(trips)
    outer = [case.num_rounds] if case.num_rounds > 1 else []
    assert trips == [
        case.cfg.num_speculative_tokens - 1,
        *(TRUNCATION_TRIPS if case.cfg.processors else []),
        *outer,
    ]


def test_a_round_is_three_cuda_graphs_and_one_of_them_is_the_loops_body(case: Compiled) -> None:
    """What lies before, in and after the draft loop; the host launches nothing else. Truncation
    adds its own loops after that."""
    kinds = [thunk.kind for thunk in case.round.inside]
    assert kinds[:3] == ["kCommandBuffer", "kWhile", "kCommandBuffer"]
    assert len(kinds) == 3 or case.cfg.processors
    assert [thunk.kind for thunk in body_of(case.round).inside] == ["kCommandBuffer"]


def test_no_graph_holds_a_copy_to_an_address_that_the_host_computes(case: Compiled) -> None:
    """It would have the host update the graph in every round."""
    assert not COPIES_ON_STREAMS & set(case.thunks.launches())


@pytest.mark.parametrize(
    "case",
    [
        Round("llama-3-8b", 3, sampled=False, batch=1),
        Round("llama-3-8b", 3, sampled=True, batch=1),
        Round("llama-3-8b", 3, sampled=True, batch=1, scored=True),
        Round("llama-3-8b", 3, sampled=True, scored=True),
    ],
    ids=["greedy", "sampled", "scored", "scored, 4 requests"],
)
def test_contiguous_results_of_a_loop_are_written_by_kernels(case: Round) -> None:
    """XLA could copy them, each on a stream of its own: the column of a single request, and the
    likeliest tokens."""
    assert not COPIES_ON_STREAMS & set(compiled(case).thunks.launches())


def test_no_small_array_is_copied(case: Compiled) -> None:
    """A copy is a launch. The indices of loops are, and what a loop of several rounds starts
    from."""
    entry = case.hlo[case.hlo.index("ENTRY ") :]
    copies = re.findall(r"= \w+\[\d[\d,]*\]\S* copy(?:-start)?\(.*", entry)
    assert not copies or case.num_rounds > 1, copies


def test_nothing_calls_the_host_and_nothing_sorts(case: Compiled) -> None:
    assert set(re.findall(r'custom_call_target="([^"]*)"', case.hlo)) == {"mosaic_gpu_v2"}
    assert not re.findall(r" (?:sort|topk|infeed|outfeed|send|recv|async-start)\(.*", case.hlo)


def test_no_kernel_is_launched_a_second_time_inside_a_fusion(case: Compiled) -> None:
    """XLA copies a call into the "dynamic slice fusion" that writes its result into one step's
    columns, and keeps the call as well."""
    computations = re.findall(
        r"^(?:ENTRY )?%([\w.\-]+) \([^\n]*\{\n(.*?)^\}", case.hlo, re.M | re.S
    )
    assert not [name for name, body in computations if "fusion" in name and "mosaic_gpu" in body]


def test_no_noise_is_written(case: Compiled) -> None:
    """Kernels make it in registers, and keys and uniforms with it: what is left to XLA hashes
    nothing, so it shifts no word."""
    if case.cfg.processors:
        pytest.skip("what cuts logits is XLA's, and shifts their bits")
    assert "shift-right-logical(" not in case.hlo


def test_no_kernel_spills(case: Compiled) -> None:
    report = h200.stack_and_spills(case.ptxas)
    assert report, "expected ptxas's report on at least one kernel"
    assert set(report) == {(0, 0, 0), STEP_METADATA}


def test_each_pass_has_one_launch_for_its_metadata(case: Compiled) -> None:
    """Draft step 0's and the target's, and one in the draft loop's body; nothing else makes tables
    of the rotation or bounds of keys."""
    rows, around = case.cfg.num_speculative_tokens + 1, case.num_loops - 1
    launched = re.findall(r'mosaic_gpu_v2", .*op_name="([^"]*/step_metadata_\d+)/', case.hlo)
    assert Counter((name.count("/while/body"), name.rpartition("_")[2]) for name in launched) == {
        (around, str(rows)): 2,
        (around + 1, "1"): 1,
    }
    assert not re.findall(
        r" (?:cosine|sine)\(|jit\(paged_attention\)/(?:concatenate|reduce)", case.hlo
    )


@pytest.mark.parametrize(("name", "launches"), LAUNCHES_OF_A_DRAFT_STEP.items())
def test_launches_of_a_draft_step(name: str, launches: int) -> None:
    """All of the loop's body."""
    body = body_of(compiled(ROUNDS[name]).round)
    assert body.launches().total() == launches, dict(body.launches())


def test_a_pass_over_tokens_begins_with_one_launch(case: Compiled) -> None:
    """In the loop's body a draft step, around it the round's first one and the target's pass. Where
    products share the norms between them, a pass has the norm of its end. Else each layer has its
    second norm, and later layers their first."""
    kernel = r'mosaic_gpu_v2", .*op_name="jit\(decode_round\w+\)/(.*)/(embed_norm|rms_norm)_\d+/'
    found = Counter(
        (where.count("while/body") == case.num_loops, name)
        for where, name in re.findall(kernel, case.hlo)
    )
    width, layers = case.cfg.target.hidden_size, case.cfg.target.num_layers
    shared = shares_norm(1, width)
    of_target, of_draft_step = (1, 1) if shared else (2 * layers, 2)
    assert found == {
        (True, "embed_norm"): 1,
        (True, "rms_norm"): of_draft_step,
        (False, "embed_norm"): 2,
        (False, "rms_norm"): of_target + of_draft_step,
    }
    gathers = re.findall(rf"= bf16\[(?:\d+,)*{width}\]\S* gather\(.*", case.hlo)
    assert all(
        "jit(take_along_axis)" in line for line in gathers
    )  # of the hidden state of the last accepted token
    assert not re.findall(rf"= bf16\[(?:\d+,)*{2 * width}\]\S* concatenate\(.*", case.hlo)


@pytest.mark.parametrize("model", ["llama-3-8b", "smollm2-135m"])
def test_launches_of_a_target_layer(model: str) -> None:
    """By the difference of two depths, so that no launch escapes for want of a name."""
    [shallow] = [
        r
        for r in ROUNDS.values()
        if r.model == model and r.num_speculative_tokens == 3 and r.num_rounds == 1
    ]
    more = compiled(replace(shallow, layers=shallow.layers + 2)).thunks.launches()
    more.subtract(compiled(shallow).thunks.launches())
    assert more.total() <= 2 * LAUNCHES_PER_LAYER[model], dict(more)


@pytest.mark.parametrize(
    ("model", "batch", "launches"),
    [
        ("llama-3-8b-fp8", 1, LAUNCHES_PER_LAYER["llama-3-8b"] - 2),
        ("llama-3-8b-fp8", BATCH, LAUNCHES_PER_LAYER["llama-3-8b"] + 2),
        ("llama-3-8b-fp8", 64, LAUNCHES_PER_LAYER["llama-3-8b"] + 4),
        ("llama-3-8b-int4", BATCH, LAUNCHES_PER_LAYER["llama-3-8b"] - 2),
    ],
)
def test_launches_of_a_quantised_layer(model: str, batch: int, launches: int) -> None:
    """Products share norms, and with fp8 they quantise few rows themselves. Of more rows, a kernel
    before each product does it. Of 256 rows, one does it after gate and up, and one after each
    residual sum; XLA casts the float32 result of qkv."""
    shallow = Round(model, 3, sampled=False, batch=batch)
    more = compiled(replace(shallow, layers=shallow.layers + 2)).thunks.launches()
    more.subtract(compiled(shallow).thunks.launches())
    assert more.total() <= 2 * launches, dict(more)


@pytest.mark.parametrize("model", ["llama-3-8b", "smollm2-135m"])
def test_a_sampled_draft_step_launches_what_a_greedy_one_does_and_keeps_its_logits(
    model: str,
) -> None:
    """Temperature, noise and argmax are two launches, as the argmax alone; XLA takes three more.
    The one that is more copies the logits."""
    cases = [
        next(
            r
            for r in ROUNDS.values()
            if r.model == model and r.sampled == sampled and not r.truncated
        )
        for sampled in (False, True)
    ]
    greedy, sampled = (compiled(r).thunks.inside[1].launches() for r in cases)
    assert sampled.total() == greedy.total() + 1, (sampled, greedy)


def test_gate_and_up_of_256_rows_are_the_kernels_and_no_product_copies_its_weights() -> None:
    """Of the target's layers: 64 requests with four rows each (a draft step has one). The other
    products of so many rows are cuBLAS's. The parts of down are summed with the next layer's norm.
    """
    case = compiled(LARGE_BATCH)
    launched = re.findall(r'mosaic_gpu_v2", .*op_name="[^"]*/(swiglu_\w+)/', case.hlo)
    assert launched == ["swiglu_4096x14336_rows256"] * LARGE_BATCH.layers
    sums = re.findall(r'mosaic_gpu_v2", .*op_name="[^"]*/(sum_norm_\w+)/', case.hlo)
    assert sums == ["sum_norm_2x4096"] * (LARGE_BATCH.layers - 1)
    gate = r"bf16\[(?:4096,14336|14336,4096|4096,28672|2,7168,4096)\]"
    assert not re.findall(rf"= \(?{gate}\S* (?!parameter|get-tuple-element|bitcast)\w.*", case.hlo)


@pytest.mark.slow
def test_a_round_over_fp8_caches_of_a_long_context_copies_no_cache_and_spills_nothing() -> None:
    """16 requests of 32,768 tokens: the kernels write and read e4m3."""
    case = compiled(LONG_CONTEXT)
    blocks = LONG_CONTEXT.batch * LONG_CONTEXT.pages
    shape = rf"f8e4m3fn\[{blocks},64,8,128\]"
    assert re.findall(shape, case.hlo)
    moves = "copy|copy-start|fusion|transpose|scatter|dynamic-update-slice|convert|gather"
    assert not re.findall(rf"= \(?[^=(]*{shape}[^=]*? (?:{moves})\(.*", case.hlo)
    caches = 2 * (case.cfg.target.num_layers + case.cfg.draft.num_layers)
    assert case.aliased >= caches * blocks * 64 * 8 * 128
    assert set(h200.stack_and_spills(case.ptxas)) == {(0, 0, 0), STEP_METADATA}
    assert [thunk.kind for thunk in case.round.inside] == [
        "kCommandBuffer",
        "kWhile",
        "kCommandBuffer",
    ]
