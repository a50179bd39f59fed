"""FLOPs and bytes of programs whose cost is known: hand-written text, and loops that XLA compiled for the host."""

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.plan import hlo

# Two layers of an outer loop, each with three steps of an inner one; a gather in the outer, a product in the inner.
NESTED = """\
HloModule nested

%inner_test (p: (s32[], f32[8,4])) -> pred[] {
  %p = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%inner_body (p.1: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p.1 = (s32[], f32[8,4]{1,0}) parameter(0)
  %x = f32[8,4]{1,0} get-tuple-element(%p.1), index=1
  %w = f32[4,4]{1,0} constant({...})
  %y = f32[8,4]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (s32[], f32[8,4]{1,0}) tuple(%i.1, %y)
}

%outer_test (p.2: (s32[], f32[8,4])) -> pred[] {
  %p.2 = (s32[], f32[8,4]{1,0}) parameter(0)
  ROOT %less.1 = pred[] custom-call(%p.2), custom_call_target="unknown"
}

%outer_body (p.3: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p.3 = (s32[], f32[8,4]{1,0}) parameter(0)
  %part = f32[2,4]{1,0} slice(%p.3), slice={[0:2], [0:4]}
  %whole = f32[8,4]{1,0} all-gather(%part), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
  %sum = f32[8,4]{1,0} all-reduce(%whole), replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %while.1 = (s32[], f32[8,4]{1,0}) while(%p.3), condition=%inner_test, body=%inner_body
}

ENTRY %main (a: f32[8,4]) -> (s32[], f32[8,4]) {
  %a = f32[8,4]{1,0} parameter(0)
  ROOT %while.2 = (s32[], f32[8,4]{1,0}) while(%a), condition=%outer_test, body=%outer_body, backend_config={"known_trip_count":{"n":"2"}}
}
"""


def test_nested_loops_multiply():
    costs = hlo.costs(NESTED)
    assert costs.flops == 2 * 3 * (2 * 8 * 4 * 4)
    assert costs.loops == {"outer_body": 2, "inner_body": 3}
    # A gather of 4 devices sends its 32-byte part three times; a sum over 2 sends half its 128 bytes twice.
    assert costs.collective_bytes == {"all-gather": 2 * 32 * 3, "all-reduce": 2 * 2 * 128 / 2}


def test_a_loop_of_unknown_length_counts_once_and_says_so():
    costs = hlo.costs(NESTED.replace(', backend_config={"known_trip_count":{"n":"2"}}', ""))
    assert costs.loops["outer_body"] is None
    assert costs.flops == 3 * (2 * 8 * 4 * 4)


# Matrix products as TPU programs write them: [4, 128, 256] x [256, 512]; a batched one, dilated; a weight gradient over rows;
# [128, 256] x [4, 256, 512], whose window is padding but for one value.
CONVOLUTIONS = """\
ENTRY %main (x: bf16[4,128,256], w: bf16[1,256,512], y: bf16[4,128,256]) -> bf16[256,512,1] {
  %x = bf16[4,128,256]{2,1,0:T(8,128)(2,1)} parameter(0)
  %w = bf16[1,256,512]{2,1,0:T(8,128)(2,1)} parameter(1)
  %y = bf16[4,128,256]{2,1,0:T(8,128)(2,1)} parameter(2)
  %z = bf16[4,128,512]{2,1,0:T(8,128)(2,1)} parameter(3)
  %a = bf16[4,128,512]{2,1,0} convolution(%x, %w), window={size=1}, dim_labels=0bf_0io->0bf
  %b = bf16[4,128,128]{2,1,0} convolution(%x, %y), window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0oi->0bf
  %u = bf16[1,128,256]{2,1,0:T(8,128)(2,1)} parameter(4)
  %v = bf16[4,256,512]{2,1,0:T(8,128)(2,1)} parameter(5)
  %d = bf16[4,128,512]{2,1,0} convolution(%u, %v), window={size=4 pad=3_3 rhs_reversal=1}, dim_labels=0bf_0io->0bf
  ROOT %c = bf16[256,512,1]{1,0,2} convolution(%x, %z), window={size=4}, dim_labels=0fb_0io->bf0
}
"""


def test_matrix_products_written_as_convolutions():
    product, batched, gradient = 2 * 4 * 128 * 256 * 512, 2 * 4 * 128 * 128 * 256, 2 * 4 * 128 * 256 * 512
    spread = 2 * 4 * 128 * 256 * 512
    assert hlo.costs(CONVOLUTIONS).flops == product + batched + gradient + spread


def test_a_compiled_scan_counts_every_layer():
    def f(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    shapes = jax.ShapeDtypeStruct((16, 32), jnp.float32), jax.ShapeDtypeStruct((5, 32, 32), jnp.float32)
    costs = hlo.costs(jax.jit(f).lower(*shapes).compile().as_text())
    assert costs.flops == 5 * 2 * 16 * 32 * 32
    assert not costs.collective_bytes


def test_what_is_not_a_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.costs("nothing")
