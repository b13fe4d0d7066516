// Attention of single queries over pages of bfloat16 keys and values, on Hopper.
//
// Bound by memory, so everything serves to keep bytes coming: a few blocks for each multiprocessor, whose first warp
// fetches tiles of KEYS keys and their values into a ring of STAGES, from one piece of work to the next without a
// pause, and no more of a last tile than there is. A piece is an item of `kernels.attention` and a key head; blocks
// take the next one when they are through. The other warps have SLICES · 16 keys of each tile to themselves and are
// brought together at the end of a piece; who ends the last piece of a sequence that is split joins its parts. Of a
// slice of 16 keys:
//
//     scores (16, Q) = keys (16, D) · queries (D, Q)       sums (D, Q) += valuesᵀ (D, 16) · weights (16, Q)
//
// The host defines D (64 or 128), Q (at most 8 queries of a key head), GROUPS, PAGE and STAGES.

constexpr int WARPS = 2, SLICES = 2, SLICE = 16, MINE = SLICES * SLICE, KEYS = WARPS * MINE, QUERIES = 8;
constexpr int FEW = 8;  // keys that are fetched at a time where a tile is not filled
constexpr int BOX = 64, BOXES = D / BOX, ROW = BOXES * LINE;      // columns of a line, lines and bytes of a row
constexpr int TILE_BYTES = KEYS * ROW, STAGE_BYTES = 2 * TILE_BYTES;  // keys, then values
constexpr int EACH = BOX * QUERIES / (WARPS * 32);                           // columns of a query that a thread writes
constexpr int PADDED = BOX + 4;                                              // no two lanes write to one bank
constexpr int END = -1;
constexpr float ROOM = 8.0f;  // powers of two by which a weight may pass 1 before the maximum is taken anew

struct Item { int token, count, position, first, last, place, part, merge; };
struct Merge { int token, first, parts, unused; };

// Where 8 neighbouring columns of a row lie in a tile, as the copy engine swizzled its lines; and from the place of a
// row's columns 0–7 or 8–15 to those 16 · `twos` columns further and `rows`, a multiple of 8, below.
static_assert(BOXES <= 2, "a row has more lines than `further` knows of");
__device__ __forceinline__ u32 place_of(u32 tile, int row, int eight) {
    const int line = row * BOXES + eight / 8;
    return tile + line * LINE + ((eight % 8 ^ line % 8) << 4);
}
__device__ __forceinline__ u32 further(u32 place, int twos, int rows) {
    return (place ^ (twos % 4 << 5 | twos / 4 << 4)) + twos / 4 * LINE + rows * ROW;
}

// ── The kernel ──────────────────────────────────────────────────────────────────────────────────────────

struct Shared {
    u64 full[STAGES], empty[STAGES];
    int piece[STAGES], begin[STAGES];  // what a stage is of; END: nothing more comes
    float best[WARPS][QUERIES], total[WARPS][QUERIES];
    float sums[WARPS][QUERIES][PADDED];
    bool joins;
};

struct Maps { TensorMap keys, values, few_keys, few_values; };  // fetched by tiles, and by FEW

__device__ __forceinline__ void prepare_fetches(const Maps &maps) {
    if (threadIdx.x == 0) prepare_fetch(&maps.keys), prepare_fetch(&maps.values);
    if (threadIdx.x == 1) prepare_fetch(&maps.few_keys), prepare_fetch(&maps.few_values);
}

__device__ __forceinline__ void produce(const Maps &maps, const int *table, const Item *items, int pieces,
                                        int head_rows, int table_stride, int *next, u32 ring, Shared &shared) {
    const int lane = threadIdx.x % 32;
    int stage = 0, parity = 1, piece = blockIdx.x;
    auto pages_from = [&](const Item &item, int begin) {
        const int at = begin + lane * KEYS;
        return at < item.last ? table[(u64)item.place * table_stride + at / PAGE] : 0;
    };
    // Neither items nor table are written by the kernel before this one.
    prepare_fetches(maps);
    Item item = items[piece / GROUPS];
    int pages = pages_from(item, item.first);
    await_kernel_before();
    while (item.count) {  // if there are no queries, there are none in what follows
        const int first_row = piece % GROUPS * head_rows;
        int after = 0;
        if (lane == 0) after = gridDim.x + atomicAdd(next, 1);
        for (int begin = item.first; begin < item.last; begin += 32 * KEYS) {
            if (begin > item.first) pages = pages_from(item, begin);
            const int tiles = min(32, (item.last - begin + KEYS - 1) / KEYS);
            for (int tile = 0; tile < tiles; tile++) {
                const int from = begin + tile * KEYS, left = item.last - from;
                const int row = first_row + __shfl_sync(ALL, pages, tile) * PAGE + from % PAGE;
                if (lane == 0) {
                    const u32 barrier = address(&shared.full[stage]), to = ring + stage * STAGE_BYTES;
                    await(address(&shared.empty[stage]), parity);
                    shared.piece[stage] = piece, shared.begin[stage] = from;
                    if (left > KEYS - FEW) {
                        expect(barrier, STAGE_BYTES);
                        fetch(to, &maps.keys, 0, row * BOXES, barrier, READ_ONCE);
                        fetch(to + TILE_BYTES, &maps.values, 0, row * BOXES, barrier, READ_ONCE);
                    } else {
                        const int count = (left + FEW - 1) / FEW;
                        expect(barrier, STAGE_BYTES / (KEYS / FEW) * count);
                        for (int down = 0; down < count * FEW; down += FEW) {
                            const int line = (row + down) * BOXES;
                            fetch(to + down * ROW, &maps.few_keys, 0, line, barrier, READ_ONCE);
                            fetch(to + down * ROW + TILE_BYTES, &maps.few_values, 0, line, barrier, READ_ONCE);
                        }
                    }
                }
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
        piece = __shfl_sync(ALL, after, 0);
        if (piece >= pieces) break;
        item = items[piece / GROUPS];
        pages = pages_from(item, item.first);
    }
    if (lane == 0) {
        await(address(&shared.empty[stage]), parity);
        shared.piece[stage] = END;
        arrive(address(&shared.full[stage]));
        // The last block leaves the counters as it found them.
        __threadfence();
        if (atomicAdd(next + 1, 1) == gridDim.x - 1) next[0] = next[1] = 0;
    }
}

__device__ __forceinline__ float highest_of(const float (&best)[WARPS][QUERIES], int query) {
    float highest = best[0][query];
    for (int w = 1; w < WARPS; w++) highest = fmaxf(highest, best[w][query]);
    return highest;
}

// The parts of a sequence, in their order: the result does not depend on who joins them.
__device__ __forceinline__ void join(const Merge merge, const float *partial, const float *statistics,
                                     unsigned short *out, int out_stride, int head, int column) {
    constexpr int AT_ONCE = 4;
    float best = lowest(), total = 0.0f, sums[BOXES][EACH] = {};
    for (int from = 0; from < merge.parts; from += AT_ONCE) {
        float theirs[AT_ONCE][2], part[AT_ONCE][BOXES][EACH];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const u64 at = (u64)(merge.first + min(from + i, merge.parts - 1)) * (GROUPS * Q) + head;
            load_from_all(theirs[i], statistics + 2 * at);
#pragma unroll
            for (int box = 0; box < BOXES; box++) load_from_all(part[i][box], partial + at * D + box * BOX + column);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (from + i >= merge.parts) break;
            const float higher = fmaxf(best, theirs[i][0]);
            const float fade = power_of_2(best - higher), share = power_of_2(theirs[i][0] - higher);
            best = higher, total = total * fade + theirs[i][1] * share;
#pragma unroll
            for (int j = 0; j < BOXES * EACH; j++)
                sums[j / EACH][j % EACH] = sums[j / EACH][j % EACH] * fade + part[i][j / EACH][j % EACH] * share;
        }
    }
#pragma unroll
    for (int box = 0; box < BOXES; box++) {
        u32 *to = (u32 *)(out + (u64)merge.token * out_stride + head * D + box * BOX + column);
#pragma unroll
        for (int i = 0; i < EACH; i += 2) to[i / 2] = pair(sums[box][i] / total, sums[box][i + 1] / total);
    }
}

__device__ __forceinline__ void consume(const unsigned short *q, const Item *items, const Merge *merges,
                                        unsigned short *out, float *partial, float *statistics, int *arrived,
                                        int q_stride, int out_stride, float scale, u32 ring, Shared &shared) {
    const int thread = threadIdx.x - 32, warp = thread / 32, lane = thread % 32, row = lane / 4, quarter = lane % 4;
    int stage = 0, parity = 0;
    await_kernel_before();
    let_next_begin();
    await(address(&shared.full[0]), 0);
    for (int piece = shared.piece[0]; piece != END;) {
        const Item item = items[piece / GROUPS];
        const int group = piece % GROUPS;
        u32 queries[D / 16][2];
        const unsigned short *mine = q + (u64)item.token * q_stride + (group * Q + row) * D + 2 * quarter;
#pragma unroll
        for (int k = 0; k < D / 16; k++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                queries[k][half] = row < Q ? *(const u32 *)(mine + 16 * k + 8 * half) : 0;

        float best[2] = {lowest(), lowest()}, total[2] = {0.0f, 0.0f}, sums[D / 16][4] = {};
        for (int here = piece; here == piece;) {
            const int left = item.last - shared.begin[stage] - warp * MINE;
            if (left > 0) {
                const u32 keys = ring + stage * STAGE_BYTES, values = keys + TILE_BYTES;
                if (left < MINE) {
                    // Behind the end lies what another sequence left, perhaps no number, and 0 times that is none.
                    for (int i = lane; i < (MINE - left) * (D / 8); i += 32)
                        clear_16_bytes(place_of(values, warp * MINE + left + i / (D / 8), i % (D / 8)));
                    before_copies();
                    __syncwarp();
                }
                float scores[SLICES][4] = {};
                const u32 key = place_of(keys, warp * MINE + lane % 16, lane / 16);
#pragma unroll
                for (int k = 0; k < D / 16; k++)
#pragma unroll
                    for (int slice = 0; slice < SLICES; slice++) {
                        u32 a[4];
                        load(a, further(key, k, slice * SLICE));
                        multiply(scores[slice], a, queries[k][0], queries[k][1]);
                    }
                float most[2] = {lowest(), lowest()};
#pragma unroll
                for (int slice = 0; slice < SLICES; slice++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const bool none = left < MINE && slice * SLICE + row + i / 2 * 8 >= left;
                        scores[slice][i] = none ? lowest() : scores[slice][i] * scale;
                        most[i % 2] = fmaxf(most[i % 2], scores[slice][i]);
                    }
                if (__any_sync(ALL, most[0] > best[0] + ROOM || most[1] > best[1] + ROOM)) {
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        float higher = fmaxf(best[j], most[j]);
                        for (int other = 4; other < 32; other *= 2)
                            higher = fmaxf(higher, __shfl_xor_sync(ALL, higher, other));
                        const float fade = power_of_2(best[j] - higher);
                        best[j] = higher, total[j] *= fade;
#pragma unroll
                        for (int d = 0; d < D / 16; d++) sums[d][j] *= fade, sums[d][j + 2] *= fade;
                    }
                }
                u32 weights[SLICES][2];
#pragma unroll
                for (int slice = 0; slice < SLICES; slice++) {
                    float (&w)[4] = scores[slice];
#pragma unroll
                    for (int i = 0; i < 4; i++) w[i] = power_of_2(w[i] - best[i % 2]), total[i % 2] += w[i];
                    weights[slice][0] = transposed(pair(w[0], w[1])), weights[slice][1] = transposed(pair(w[2], w[3]));
                }
                const u32 value = place_of(values, warp * MINE + lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
                for (int slice = 0; slice < SLICES; slice++)
#pragma unroll
                    for (int d = 0; d < D / 16; d++) {
                        u32 a[4];
                        load_transposed(a, further(value, d, slice * SLICE));
                        multiply(sums[d], a, weights[slice][0], weights[slice][1]);
                    }
            }
            __syncwarp();
            if (lane == 0) arrive(address(&shared.empty[stage]));
            if (++stage == STAGES) stage = 0, parity ^= 1;
            await(address(&shared.full[stage]), parity);
            here = shared.piece[stage];
            // A piece that begins anew has the same number only if it is the same piece.
            if (here != piece) piece = here, here = END - 1;
        }

        // Together: each warp's sums are relative to its own maximum.
#pragma unroll
        for (int j = 0; j < 2; j++) {
            for (int other = 4; other < 32; other *= 2) total[j] += __shfl_xor_sync(ALL, total[j], other);
            const int query = 2 * quarter + j;
            if (row == 0) shared.best[warp][query] = best[j], shared.total[warp][query] = total[j];
        }
        await_each_other<WARPS * 32>();
        float fade[2];
#pragma unroll
        for (int j = 0; j < 2; j++) fade[j] = power_of_2(best[j] - highest_of(shared.best, 2 * quarter + j));
        const int query = thread / (BOX / EACH), column = thread % (BOX / EACH) * EACH, head = group * Q + query;
        const float highest = highest_of(shared.best, query);
        float weight = 0.0f;
        for (int w = 0; w < WARPS; w++)
            weight += shared.total[w][query] * power_of_2(shared.best[w][query] - highest);
        const u64 part = (u64)item.part * (GROUPS * Q) + head;
        if (query < Q && item.part >= 0 && column == 0)
            statistics[2 * part] = highest, statistics[2 * part + 1] = weight;
#pragma unroll
        for (int box = 0; box < BOXES; box++) {
#pragma unroll
            for (int d = 0; d < BOX / 16; d++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    shared.sums[warp][2 * quarter + i % 2][16 * d + row + i / 2 * 8] =
                        sums[box * (BOX / 16) + d][i] * fade[i % 2];
            await_each_other<WARPS * 32>();
            float sum[EACH] = {};
            for (int w = 0; w < WARPS; w++)
#pragma unroll
                for (int i = 0; i < EACH; i++) sum[i] += shared.sums[w][query][column + i];
            if (query < Q && item.part < 0) {
                u32 *to = (u32 *)(out + (u64)item.token * out_stride + head * D + box * BOX + column);
#pragma unroll
                for (int i = 0; i < EACH; i += 2) to[i / 2] = pair(sum[i] / weight, sum[i + 1] / weight);
            } else if (query < Q) {
#pragma unroll
                for (int i = 0; i < EACH; i++) partial[part * D + box * BOX + column + i] = sum[i];
                if (box == BOXES - 1) __threadfence();
            }
            await_each_other<WARPS * 32>();
        }
        if (item.part < 0) continue;
        const Merge merge = merges[item.merge];
        int *const come = arrived + item.merge * GROUPS + group;
        if (thread == 0) shared.joins = atomicAdd(come, 1) == merge.parts - 1;
        await_each_other<WARPS * 32>();
        if (!shared.joins) continue;
        __threadfence();
        if (query < Q) join(merge, partial, statistics, out, out_stride, head, column);
        if (thread == 0) *come = 0;
    }
}

extern "C" __global__ void __launch_bounds__((WARPS + 1) * 32, 2)
attend_single(const __grid_constant__ Maps maps, const unsigned short *q, const int *table, const Item *items,
              const Merge *merges, unsigned short *out, float *partial, float *statistics, int *counters, int pieces,
              int q_stride, int out_stride, int head_rows, int table_stride, float scale) {
    SHARED_ROOM(room);
    SHARED(Shared, shared);
    const u32 ring = (address(room) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            begin_barrier(address(&shared.full[stage]), 1);
            begin_barrier(address(&shared.empty[stage]), WARPS);
        }
        publish_barriers();
    }
    __syncthreads();
    if (threadIdx.x < 32)
        produce(maps, table, items, pieces, head_rows, table_stride, counters, ring, shared);
    else
        consume(q, items, merges, out, partial, statistics, counters + 2, q_stride, out_stride, scale, ring, shared);
}
