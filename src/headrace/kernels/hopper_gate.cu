// out (M, I) = silu(x · gateᵀ) · (x · upᵀ) for x (M, K) and weight (2·I, K), gate's rows and then up's, in bfloat16.
//
// A block computes ROWS rows of x against COLUMNS rows of weight, half of them gate's and half the same of up's. Its
// first warp group fetches tiles into a ring of STAGES, the others multiply. A thread that holds a sum of gate's
// holds up's for it too, so the gate costs no memory.
//
//     stage:  x (ROWS, 64) │ gate (COLUMNS / 2, 64) │ up (COLUMNS / 2, 64)     lines of 128 bytes, swizzled
//
// The host defines CONSUMERS, SUBTILES, COLUMNS and STAGES, and replaces MULTIPLY.

constexpr int DEPTH = 64, WARP_GROUP = 128;
constexpr int ROWS = CONSUMERS * SUBTILES * 64;
constexpr int X_BYTES = ROWS * LINE, WEIGHT_BYTES = COLUMNS * LINE, STAGE_BYTES = X_BYTES + WEIGHT_BYTES;
constexpr int WIDTH = COLUMNS / 2, SUMS = COLUMNS / 2;  // columns of out; sums that a thread has of a subtile

// ── The product of tiles ────────────────────────────────────────────────────────────────────────────────

// Of a tile in shared memory, rows of one swizzled line each: what the tensor cores are told of it.
__device__ __forceinline__ u64 described(u32 tile) {
    return (u64)((tile & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(8 * LINE >> 4) << 32 | (u64)1 << 62;
}

// MULTIPLY

// ── The gate ────────────────────────────────────────────────────────────────────────────────────────────

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// Two neighbours, rounded where separate products and the reference's gate round.
__device__ __forceinline__ u32 gated(const float *gate, const float *up) {
    u32 g = pair(gate[0], gate[1]), u = pair(up[0], up[1]);
    u32 s = pair(silu(low(g)), silu(high(g)));
    return pair(low(s) * low(u), high(s) * high(u));
}

// Of four lanes each has a pair of columns of four blocks; then each has the four pairs of one block.
__device__ __forceinline__ void transpose(u32 (&v)[4], int lane) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & bit) continue;
            bool upper = lane & bit;
            u32 other = __shfl_xor_sync(ALL, upper ? v[i] : v[i | bit], bit);
            if (upper) v[i] = other;
            else v[i | bit] = other;
        }
}

// ── The kernel ──────────────────────────────────────────────────────────────────────────────────────────

extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * WARP_GROUP, 1)
gated_product(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight, unsigned short *out,
              int rows, int width, int depth) {
    SHARED_ROOM(room);
    __shared__ u64 barriers[2 * STAGES];
    const u32 ring = (address(room) + 1023) & ~1023u;
    const u32 full = address(barriers), empty = address(barriers + STAGES);
    const int group = threadIdx.x / WARP_GROUP, lane = threadIdx.x % 32;
    const int column = blockIdx.x * WIDTH, row = blockIdx.y * ROWS, steps = (depth + DEPTH - 1) / DEPTH;

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            begin_barrier(full + 8 * stage, 1);
            begin_barrier(empty + 8 * stage, CONSUMERS * 4);
        }
        publish_barriers();
    }
    __syncthreads();

    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) {
            const u64 hint = gridDim.y == 1 ? READ_ONCE : READ_AGAIN;
            auto fetch_weight = [&](int step, int stage) {
                u32 to = ring + stage * STAGE_BYTES + X_BYTES, barrier = full + 8 * stage;
                expect(barrier, STAGE_BYTES);
                fetch(to, &weight, step * DEPTH, column, barrier, hint);
                fetch(to + WEIGHT_BYTES / 2, &weight, step * DEPTH, width + column, barrier, hint);
            };
            auto fetch_x = [&](int step, int stage) {
                fetch(ring + stage * STAGE_BYTES, &x, step * DEPTH, row, full + 8 * stage, READ_AGAIN);
            };
            const int first = steps < STAGES ? steps : STAGES;
            // The kernel before this one writes x, but no weights.
            for (int step = 0; step < first; step++) fetch_weight(step, step);
            await_kernel_before();
            let_next_begin();
            for (int step = 0; step < first; step++) fetch_x(step, step);
            for (int step = first; step < steps; step++) {
                int stage = step % STAGES;
                await(empty + 8 * stage, (step / STAGES - 1) & 1);
                fetch_weight(step, stage);
                fetch_x(step, stage);
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const int consumer = group - 1;
        float sums[SUBTILES][SUMS];
#pragma unroll
        for (int i = 0; i < SUBTILES; i++)
#pragma unroll
            for (int j = 0; j < SUMS; j++) sums[i][j] = 0.0f;

        for (int step = 0, stage = 0, before = 0, parity = 0; step < steps; step++) {
            await(full + 8 * stage, parity);
            u32 tile = ring + stage * STAGE_BYTES;
            u64 weights = described(tile + X_BYTES);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int part = 0; part < DEPTH / 16; part++)
#pragma unroll
                for (int i = 0; i < SUBTILES; i++)
                    multiply(sums[i], described(tile + (consumer * SUBTILES + i) * 64 * LINE) + 2 * part,
                             weights + 2 * part);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (step > 0 && lane == 0) arrive(empty + 8 * before);
            before = stage;
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");

        // Of each eight columns a thread has two neighbours, in two rows.
        const int warp = threadIdx.x % WARP_GROUP / 32;
#pragma unroll
        for (int i = 0; i < SUBTILES; i++)
#pragma unroll
            for (int lower = 0; lower < 2; lower++) {
                int to_row = row + (consumer * SUBTILES + i) * 64 + warp * 16 + lower * 8 + lane / 4;
#pragma unroll
                for (int four = 0; four < WIDTH / 32; four++) {
                    u32 v[4];
#pragma unroll
                    for (int block = 0; block < 4; block++) {
                        const float *gate = &sums[i][4 * (4 * four + block) + 2 * lower];
                        v[block] = gated(gate, gate + SUMS / 2);
                    }
                    transpose(v, lane);
                    int to_column = column + (4 * four + lane % 4) * 8;
                    if (to_row < rows && to_column < width)
                        *(uint4 *)(out + (u64)to_row * width + to_column) = make_uint4(v[0], v[1], v[2], v[3]);
                }
            }
    }
}
