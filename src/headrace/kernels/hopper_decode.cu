// Attention of single queries over pages of bfloat16 keys and values, on Hopper.
//
// Bound by memory, so everything serves to keep bytes coming: a few blocks for each multiprocessor, whose first warp
// fetches tiles of KEYS keys and their values into a ring of STAGES, from one piece of work to the next without a
// pause, and no more of a last tile than there is. A piece is an item of `kernels.attention` and a key head; blocks
// take the next one when they are through. With a piece's first tile comes its opening: all else that is known of it, so
// that none who computes waits for memory under load. The other warps have SLICES · 16 keys of each tile to themselves
// and are brought together at the end of a piece; who ends the last piece of a sequence that is split joins its parts.
// Of a slice of 16 keys:
//
//     scores (16, Q) = keys (16, D) · queries (D, Q)       sums (D, Q) += valuesᵀ (D, 16) · weights (16, Q)
//
// With PROJECTED the norm per head, the rotation and the cache's write are done here too: queries are turned in the
// registers that hold them, and a sequence's newest key is not read from the cache: a piece's sums begin with it.
//
// The host defines D (64 or 128), Q (at most 8 queries of a key head), GROUPS, PAGE, STAGES, PROJECTED and NORM.

constexpr int WARPS = 2, SLICES = 2, SLICE = 16, MINE = SLICES * SLICE, KEYS = WARPS * MINE, QUERIES = 8;
constexpr int FEW = 8;  // keys that are fetched at a time where a tile is not filled
constexpr int BOX = 64, BOXES = D / BOX, ROW = BOXES * LINE;      // columns of a line, lines and bytes of a row
constexpr int TILE_BYTES = KEYS * ROW, STAGE_BYTES = 2 * TILE_BYTES;  // keys, then values
// Rows of an opening: queries, and with PROJECTED the newest key and value, cosines and sines.
constexpr int KEY = Q, VALUE = Q + 1, COSINES = Q + 2, SINES = Q + 3;
constexpr int OPENING_ROWS = PROJECTED ? Q + 4 : Q, OPENING_BYTES = OPENING_ROWS * ROW;
constexpr int EACH = BOX * QUERIES / (WARPS * 32);                           // columns of a query that a thread writes
constexpr int PADDED = BOX + 4;                                              // no two lanes write to one bank
constexpr int END = -1;
constexpr float ROOM = 8.0f;  // powers of two by which a weight may pass 1 before the maximum is taken anew

struct Item { int token, count, position, first, last, place, part, merge; };
struct Merge { int token, first, parts, unused; };

// What there is with PROJECTED: keys and values as the projections left them, by token, and where they go in a head's
// rows of the cache. A token without a row has its key there already.
struct Projected {
    const unsigned short *k, *v, *cos, *sin, *q_norm, *k_norm;
    unsigned short *keys, *values;
    const int *rows;
    int k_stride, v_stride;
    float eps;
};

// The row of the newest key, if that is to be made here, and is this item's; END otherwise.
__device__ __forceinline__ int newest_of(const Item &item, const Projected &projected) {
    const bool last = PROJECTED && item.last == item.position + 1;
    return last ? max(projected.rows[item.token], END) : END;
}

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
    Item item[STAGES];                 // of a piece's first stage
    int newest[STAGES];
    float best[WARPS][QUERIES], total[WARPS][QUERIES];
    float sums[WARPS][QUERIES][PADDED];
    bool joins;
};

struct Maps { TensorMap keys, values, few_keys, few_values; };  // fetched by tiles, and by FEW

__device__ __forceinline__ void prepare_fetches(const Maps &maps) {
    if (threadIdx.x == 0) prepare_fetch(&maps.keys), prepare_fetch(&maps.values);
    if (threadIdx.x == 1) prepare_fetch(&maps.few_keys), prepare_fetch(&maps.few_values);
}

__device__ __forceinline__ u32 opening_of(u32 ring, int stage) {
    return ring + STAGES * STAGE_BYTES + stage * OPENING_BYTES;
}
__device__ __forceinline__ void fetch_opening(u32 to, const unsigned short *q, int q_stride, const Projected &projected,
                                           const Item &item, int group, u32 barrier) {
    const u64 token = item.token;
    fetch_bytes(to, q + token * q_stride + group * (Q * D), Q * ROW, barrier);
    if constexpr (PROJECTED) {
        fetch_bytes(to + KEY * ROW, projected.k + token * projected.k_stride + group * D, ROW, barrier);
        fetch_bytes(to + VALUE * ROW, projected.v + token * projected.v_stride + group * D, ROW, barrier);
        fetch_bytes(to + COSINES * ROW, projected.cos + token * D, ROW, barrier);
        fetch_bytes(to + SINES * ROW, projected.sin + token * D, ROW, barrier);
    }
}

__device__ __forceinline__ void produce(const Maps &maps, const unsigned short *q, const int *table, const Item *items,
                                        const Projected &projected, int pieces, int q_stride, int head_rows,
                                        int table_stride, int *next, u32 ring, Shared &shared) {
    const int lane = threadIdx.x % 32;
    int stage = 0, parity = 1, piece = blockIdx.x;
    auto pages_from = [&](const Item &item, int begin) {
        const int at = begin + lane * KEYS;
        return at < item.last ? table[(u64)item.place * table_stride + at / PAGE] : 0;
    };
    // Neither items nor table nor rows are written by the kernel before this one; nor the norms' weights.
    prepare_fetches(maps);
    Item item = items[piece / GROUPS];
    int pages = pages_from(item, item.first), newest = newest_of(item, projected);
    await_kernel_before();
    while (item.count) {  // if there are no queries, there are none in what follows
        const int first_row = piece % GROUPS * head_rows;
        int after = 0;
        if (lane == 0) after = gridDim.x + atomicAdd(next, 1);
        for (int begin = item.first; begin < item.last; begin += 32 * KEYS) {
            if (begin > item.first) pages = pages_from(item, begin);
            const int tiles = min(32, (item.last - begin + KEYS - 1) / KEYS);
            for (int tile = 0; tile < tiles; tile++) {
                const int from = begin + tile * KEYS, left = item.last - (newest != END) - from;
                const int row = first_row + __shfl_sync(ALL, pages, tile) * PAGE + from % PAGE;
                if (lane == 0) {
                    const u32 barrier = address(&shared.full[stage]), to = ring + stage * STAGE_BYTES;
                    const bool begins = from == item.first, whole = left > KEYS - FEW;
                    const int count = whole ? KEYS / FEW : (left + FEW - 1) / FEW;
                    await(address(&shared.empty[stage]), parity);
                    shared.piece[stage] = piece, shared.begin[stage] = from;
                    if (begins) shared.item[stage] = item, shared.newest[stage] = newest;
                    expect(barrier, STAGE_BYTES / (KEYS / FEW) * count + (begins ? OPENING_BYTES : 0));
                    if (begins)
                        fetch_opening(opening_of(ring, stage), q, q_stride, projected, item, piece % GROUPS, barrier);
                    if (whole) {
                        fetch(to, &maps.keys, 0, row * BOXES, barrier, READ_ONCE);
                        fetch(to + TILE_BYTES, &maps.values, 0, row * BOXES, barrier, READ_ONCE);
                    } else {
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
        pages = pages_from(item, item.first), newest = newest_of(item, projected);
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

// Of a row, a lane has the columns 16 k + 8 half + 2 quarter and the one after.
__device__ __forceinline__ void load_row(u32 (&row)[D / 16][2], const unsigned short *from) {
    from += threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < D / 8; i++) row[i / 2][i % 2] = *(const u32 *)(from + 8 * i);
}
__device__ __forceinline__ u32 times(u32 a, u32 b) { return pair(low(a) * low(b), high(a) * high(b)); }

// Normed and rotated, rounded where `kernels.rotate` rounds.
__device__ __forceinline__ void turn(u32 (&row)[D / 16][2], const u32 (&cosines)[D / 16][2],
                                     const u32 (&sines)[D / 16][2], const u32 (&weights)[D / 16][2], float eps) {
    if constexpr (NORM) {
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < D / 8; i++) {
            const u32 both = row[i / 2][i % 2];
            squares += low(both) * low(both) + high(both) * high(both);
        }
        for (int other = 1; other < 4; other *= 2) squares += __shfl_xor_sync(ALL, squares, other);
        const float scale = inverse_root(squares / D + eps);
#pragma unroll
        for (int i = 0; i < D / 8; i++) {
            u32 &both = row[i / 2][i % 2];
            both = times(pair(low(both) * scale, high(both) * scale), weights[i / 2][i % 2]);
        }
    }
    constexpr int APART = D / 32;  // of k, between a column of the first half and that of the second it is turned with
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        const int k = i / 2, half = i % 2;
        const u32 first = row[k][half], second = row[k + APART][half];
        const u32 a = times(first, cosines[k][half]), b = times(second, cosines[k + APART][half]);
        const u32 with_a = sines[k][half], with_b = sines[k + APART][half];
        row[k][half] = pair(fmaf(low(second), low(with_a), low(a)), fmaf(high(second), high(with_a), high(a)));
        row[k + APART][half] = pair(fmaf(low(first), low(with_b), low(b)), fmaf(high(first), high(with_b), high(b)));
    }
}

// A warp's sums when it has seen nothing but the newest key, turned, whose weight is 1.
__device__ __forceinline__ void begin_with(const u32 (&key)[D / 16][2], const unsigned short *value,
                                           const u32 (&queries)[D / 16][2], float scale, float (&best)[2],
                                           float (&total)[2], float (&sums)[D / 16][4]) {
    const int row = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < D / 8; i++) sums[i / 2][i % 2 * 2] = sums[i / 2][i % 2 * 2 + 1] = low(value[8 * i + row]);
    float score = 0.0f;
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
        const u32 mine = queries[i / 2][i % 2], theirs = key[i / 2][i % 2];
        score = fmaf(high(mine), high(theirs), fmaf(low(mine), low(theirs), score));
    }
    for (int other = 1; other < 4; other *= 2) score += __shfl_xor_sync(ALL, score, other);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        best[j] = scale * __shfl_sync(ALL, score, 4 * (2 * quarter + j));
        total[j] = row == 0 ? 1.0f : 0.0f;
    }
}

// By one warp, to their row of the cache.
__device__ __forceinline__ void write(const Projected &projected, const u32 (&key)[D / 16][2],
                                      const unsigned short *value, u64 row_of_all) {
    const int lane = threadIdx.x % 32;
    unsigned short *const to = projected.keys + row_of_all * D + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < D / 8; i++)
        if (lane / 4 == i / 2) *(u32 *)(to + 8 * i) = key[i / 2][i % 2];
    if (lane < D / 4) ((u64 *)(projected.values + row_of_all * D))[lane] = ((const u64 *)value)[lane];
}

__device__ __forceinline__ void consume(const Merge *merges, unsigned short *out, float *partial, float *statistics,
                                        const Projected &projected, int *arrived, int out_stride, int head_rows,
                                        float scale, const unsigned char *room, u32 ring, Shared &shared) {
    const int thread = threadIdx.x - 32, warp = thread / 32, lane = thread % 32, row = lane / 4, quarter = lane % 4;
    int stage = 0, parity = 0;
    u32 q_norm[D / 16][2], k_norm[D / 16][2];
    if constexpr (NORM) load_row(q_norm, projected.q_norm), load_row(k_norm, projected.k_norm);
    await_kernel_before();
    let_next_begin();
    await(address(&shared.full[0]), 0);
    for (int piece = shared.piece[0]; piece != END;) {
        const Item item = shared.item[stage];
        const int group = piece % GROUPS, newest = shared.newest[stage];
        const unsigned short *const opening = (const unsigned short *)(room + (opening_of(ring, stage) - address(room)));
        u32 queries[D / 16][2] = {};
        if (row < Q) load_row(queries, opening + row * D);
        float best[2] = {lowest(), lowest()}, total[2] = {0.0f, 0.0f}, sums[D / 16][4] = {};
        if constexpr (PROJECTED) {
            u32 cosines[D / 16][2], sines[D / 16][2];
            load_row(cosines, opening + COSINES * D), load_row(sines, opening + SINES * D);
            turn(queries, cosines, sines, q_norm, projected.eps);
            if (warp == 0 && newest != END) {
                u32 key[D / 16][2];
                load_row(key, opening + KEY * D);
                turn(key, cosines, sines, k_norm, projected.eps);
                begin_with(key, opening + VALUE * D, queries, scale, best, total, sums);
                write(projected, key, opening + VALUE * D, (u64)group * head_rows + newest);
            }
        }
        for (int here = piece; here == piece;) {
            const int left = item.last - (newest != END) - shared.begin[stage] - warp * MINE;
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
              const Merge *merges, unsigned short *out, float *partial, float *statistics,
              const __grid_constant__ Projected projected, int *counters, int pieces, int q_stride, int out_stride,
              int head_rows, int table_stride, float scale) {
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
        produce(maps, q, table, items, projected, pieces, q_stride, head_rows, table_stride, counters, ring, shared);
    else
        consume(merges, out, partial, statistics, projected, counters + 2, out_stride, head_rows, scale, room, ring,
                shared);
}
