// The product of up to 256 activation rows with a weight, for Hopper. wide.py says what for, and
// defines
//   TOKENS   activation rows of a tile, a multiple of 16
//   GROUPS   warpgroups that multiply, each 64 weight rows
//   STAGES   steps of 64 columns that are on their way at once
//   GATED    1 where the weight is gate and up: a tile has 8 rows of one, 8 of the other, and so on
//   GELU     1 where the gate's function is gelu_tanh, not SiLU
//   MULTIPLY(d, a, b, add)   64 weight rows by TOKENS activation rows by 16 columns into d, which
//                            is added to or overwritten
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) Map { char bytes[128]; };  // what the copy engine knows of a matrix

constexpr u32 COLUMNS = 64;
constexpr u32 LINE = COLUMNS * 2;  // bytes, swizzled over eight lines
constexpr u32 WEIGHT_BYTES = GROUPS * 64 * LINE;
constexpr u32 STAGE_BYTES = WEIGHT_BYTES + TOKENS * LINE;
constexpr u32 ROWS = GROUPS * (GATED ? 32 : 64);  // of a tile's result
constexpr u32 PITCH = ROWS * 2 + 16;              // bytes; odd in 16s: no two in one bank
constexpr u32 WARPS = GROUPS * 4;                 // that multiply
// Sums that fill the registers: those that multiply get some of a fourth warpgroup's.
constexpr bool TIGHT = GROUPS == 3 && TOKENS > 192;
constexpr u32 THREADS = WARPS * 32 + (TIGHT ? 128 : 32);
constexpr u64 READ_ONCE = 0x12F0000000000000;     // the L2's policy "evict first"
static_assert(TOKENS * PITCH <= STAGES * STAGE_BYTES, "the result leaves by the same memory");

__device__ __forceinline__ void init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void expect_stage(u32 barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(STAGE_BYTES) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void wait(u32 barrier, u32 phase) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(barrier), "r"(phase) : "memory");
}

__device__ __forceinline__ void copy_tokens(u32 to, const Map* x, u32 barrier, u32 column) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(to), "l"(x), "r"(barrier), "r"(column), "r"(0) : "memory");
}

__device__ __forceinline__ void copy_weights(u32 to, const Map* weight, u32 barrier, u32 column) {
  if (GATED)  // of [N / 8, 2, 8, K]
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4, %4, %5}], [%2], %6;" ::"r"(to), "l"(weight),
        "r"(barrier), "r"(column), "r"(0), "r"(blockIdx.x * ROWS / 8), "l"(READ_ONCE) : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(weight), "r"(barrier),
        "r"(column), "r"(blockIdx.x * ROWS), "l"(READ_ONCE) : "memory");
}

__device__ __forceinline__ u64 operand(u32 address) {  // lines of 128 bytes, swizzled
  return (u64)(address >> 4 & 0x3FFF) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ float gated(float gate, float up) {
  float turn = gate;
  if (GELU)  // 0.5 * (1 + tanh(z)) is the sigmoid of 2 z
    turn = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
  return __fdividef(gate, 1.0f + __expf(-turn)) * up;
}

__device__ __forceinline__ void all_that_multiply_meet() {
  asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
}

// Grid: (tiles of weight rows, parts of K), each of so many steps. out [parts, num_rows, n] bf16.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
product(const __grid_constant__ Map x, const __grid_constant__ Map weight, uint4* out,
        u32 num_rows, u32 n, u32 steps) {
  extern __shared__ __align__(1024) char memory[];
  __shared__ u64 barriers[2 * STAGES];
  u32 stages = (u32)__cvta_generic_to_shared(memory);
  u32 full = (u32)__cvta_generic_to_shared(barriers), empty = full + STAGES * 8;
  u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u32 column = blockIdx.y * steps * COLUMNS;
  u32 ahead = steps < STAGES ? steps : STAGES;
  u32 slot = 0, phase = 0;
  asm volatile("griddepcontrol.launch_dependents;");
  if (threadIdx.x == WARPS * 32) {
    for (u32 i = 0; i < STAGES; ++i) init(full + i * 8, 1), init(empty + i * 8, WARPS);
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    for (u32 i = 0; i < ahead; ++i) {
      expect_stage(full + i * 8);
      copy_weights(stages + i * STAGE_BYTES, &weight, full + i * 8, column + i * COLUMNS);
    }
  }
  __syncthreads();

  if (warp >= WARPS) {  // one of them asks for copies
    if (TIGHT) asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (threadIdx.x == WARPS * 32) {
      asm volatile("griddepcontrol.wait;" ::: "memory");
      for (u32 i = 0; i < ahead; ++i)
        copy_tokens(stages + i * STAGE_BYTES + WEIGHT_BYTES, &x, full + i * 8, column + i * COLUMNS);
      for (u32 i = STAGES; i < steps; ++i) {
        u32 stage = stages + slot * STAGE_BYTES, barrier = full + slot * 8;
        wait(empty + slot * 8, phase);
        expect_stage(barrier);
        copy_weights(stage, &weight, barrier, column + i * COLUMNS);
        copy_tokens(stage + WEIGHT_BYTES, &x, barrier, column + i * COLUMNS);
        if (++slot == STAGES) slot = 0, phase ^= 1;
      }
    }
    return;
  }

  if (TIGHT) asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
  float d[TOKENS / 2];  // rows lane / 4 and 8 further on of the warp's 16, tokens by twos
  u32 before = 0;
  for (u32 i = 0; i < steps; ++i) {
    wait(full + slot * 8, phase);
    u32 stage = stages + slot * STAGE_BYTES;
    u64 a = operand(stage + warp / 4 * 64 * LINE), b = operand(stage + WEIGHT_BYTES);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (u32 k = 0; k < COLUMNS / 16; ++k)
      MULTIPLY(d, a + 2 * k, b + 2 * k, i + k > 0);
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (lane == 0 && i > 0) arrive(empty + before * 8);
    before = slot;
    if (++slot == STAGES) slot = 0, phase ^= 1;
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (u32 i = 0; i < TOKENS / 2; ++i) asm volatile("" : "+f"(d[i])::"memory");

  all_that_multiply_meet();  // nobody reads the stages any more
#pragma unroll
  for (u32 j = 0; j < TOKENS / 16; ++j) {
    const float* of = d + 8 * j;  // 16 tokens
    if (GATED) {
      u32 first = pack(gated(of[0], of[2]), gated(of[1], of[3]));
      u32 second = pack(gated(of[4], of[6]), gated(of[5], of[7]));
      u32 to = stages + (16 * j + lane % 16) * PITCH + warp * 16;
      asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to),
                   "r"(first), "r"(second) : "memory");
    } else {
      u32 token = 16 * j + lane / 16 * 8 + lane % 8;
      u32 to = stages + token * PITCH + warp * 32 + lane / 8 % 2 * 16;
      asm volatile(
          "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
          "r"(pack(of[0], of[1])), "r"(pack(of[2], of[3])), "r"(pack(of[4], of[5])),
          "r"(pack(of[6], of[7])) : "memory");
    }
  }
  all_that_multiply_meet();
  constexpr u32 CHUNKS = ROWS / 8;  // of 16 bytes
  out += ((u64)blockIdx.y * num_rows * n + blockIdx.x * ROWS) / 8;
  for (u32 i = threadIdx.x; i < num_rows * CHUNKS; i += WARPS * 32) {
    u32 token = i / CHUNKS, chunk = i % CHUNKS;
    out[token * (n / 8) + chunk] = *(const uint4*)(memory + token * PITCH + chunk * 16);
  }
}
