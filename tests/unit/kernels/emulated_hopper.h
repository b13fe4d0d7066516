// A model of the device on the CPU: what hopper.cuh declares, by the same names, so that a kernel's text compiles and
// runs here unchanged. KERNEL is the file with that text; the host defines its constants as it does for the device.

#include "emulated_cuda.h"

// ── hopper.cuh: shared memory ───────────────────────────────────────────────────────────────────────────

#define SHARED_ROOM(name) unsigned char *const name = now->block->shared.data() + ROOM_AT
#define SHARED(type, name)                                                                     \
    static_assert(sizeof(type) <= ROOM_AT - VARIABLES_AT, "more variables than there is room"); \
    type &name = *(type *)(now->block->shared.data() + VARIABLES_AT)

// What an instruction names by its address.
static unsigned char *shared_at(u32 place, u32 bytes, u32 multiple) {
    if (place % multiple) fail("an address that is not aligned");
    if (place > SHARED_BYTES - bytes) fail("an address outside of shared memory");
    return now->block->shared.data() + place;
}

__device__ __forceinline__ u32 address(const void *shared) {
    return (u32)((const unsigned char *)shared - now->block->shared.data());
}

// ── hopper.cuh: kernels after each other ────────────────────────────────────────────────────────────────

__device__ __forceinline__ void await_kernel_before() { wait_while(&now->block->grid->before->complete, 1, 0); }
__device__ __forceinline__ void let_next_begin() { now->block->lets_next_begin = true; }

// ── hopper.cuh: barriers ────────────────────────────────────────────────────────────────────────────────

// Of the kernel: what becomes of memory when a barrier's phase is complete.
static void phase_complete(Block &block, u32 barrier);

static Barrier &barrier_at(Block &block, u32 place) {
    const auto found = block.barriers.find(place);
    if (found == block.barriers.end()) fail("there is no barrier here");
    if (!found->second.published) fail("a barrier that was not published");
    return found->second;
}
static void complete_if_all_came(Block &block, u32 place) {
    Barrier &barrier = barrier_at(block, place);
    if (barrier.missing || barrier.bytes) return;
    barrier.missing = barrier.arrivals, barrier.phase++;
    phase_complete(block, place);
}
static void arrive_with(u32 place, u32 bytes) {
    perhaps_let_others_go_first();
    Barrier &barrier = barrier_at(*now->block, place);
    if (!barrier.missing) fail("more arrivals at a barrier than it was made for");
    barrier.missing--, barrier.bytes += bytes;
    complete_if_all_came(*now->block, place);
}

__device__ __forceinline__ void begin_barrier(u32 barrier, u32 arrivals) {
    now->block->barriers[barrier] = {arrivals, arrivals, 0, 0, false};
}
__device__ __forceinline__ void publish_barriers() {
    for (auto &[_, barrier] : now->block->barriers) barrier.published = true;
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) { arrive_with(barrier, bytes); }
__device__ __forceinline__ void arrive(u32 barrier) { arrive_with(barrier, 0); }
__device__ __forceinline__ void await(u32 barrier, u32 parity) {
    wait_while(&barrier_at(*now->block, barrier).phase, 1, parity);
}
template <int THREADS> __device__ __forceinline__ void await_each_other() { meet(now->block->some, THREADS); }

// ── hopper.cuh: copies ──────────────────────────────────────────────────────────────────────────────────

__device__ __forceinline__ void prepare_fetch(const TensorMap *from) {}
static void begin_copy(const Copy &copy, u32 bytes, u32 multiple) {
    Block &block = *copy.block;
    unsigned char *place = shared_at(copy.to, bytes, multiple);
    for (u32 at = copy.to / 16; at < (copy.to + bytes) / 16; at++)
        if (block.unfenced[at]) fail("a copy over what was written with no fence between");
    memset(place, NO_NUMBER, bytes);
    copies.push_back(copy);
    perhaps_let_others_go_first();
}
__device__ __forceinline__ void fetch(u32 to, const TensorMap *from, int column, int row, u32 barrier, u64 hint) {
    begin_copy({now->block, *from, to, barrier, column, row}, from->box_rows * LINE, LINE);
}
__device__ __forceinline__ void fetch_bytes(u32 to, const void *from, u32 bytes, u32 barrier) {
    if ((size_t)from % 16 || bytes % 16) fail("a copy that is not aligned");
    begin_copy({now->block, {}, to, barrier, 0, 0, from, bytes}, bytes, 16);
}
static void land(size_t which) {
    const Copy copy = copies[which];
    copies[which] = copies.back();
    copies.pop_back();
    if (copy.bytes_from) memcpy(&copy.block->shared[copy.to], copy.bytes_from, copy.bytes);
    for (u32 r = 0; r < copy.from.box_rows; r++)
        for (u32 c = 0; c < LINE / 16; c++) {
            u32 at = copy.to + r * LINE + c * 16;
            at ^= at / LINE % 8 * 16;
            const u64 row = (u64)(copy.row + (long long)r), column = copy.column + c * 8;
            if (row < copy.from.rows && column + 8 <= copy.from.columns)
                memcpy(&copy.block->shared[at], copy.from.matrix + row * copy.from.columns + column, 16);
            else
                memset(&copy.block->shared[at], 0, 16);
        }
    barrier_at(*copy.block, copy.barrier).bytes -= (long long)copy.from.box_rows * LINE + copy.bytes;
    complete_if_all_came(*copy.block, copy.barrier);
}
__device__ __forceinline__ void clear_16_bytes(u32 shared) {
    shared_at(shared, 16, 16);
    now->unseen.push_back(shared);
    now->block->unfenced[shared / 16] = true;
    now->unfenced.push_back(shared / 16);
}
template <int COUNT> __device__ __forceinline__ void load_from_all(float (&to)[COUNT], const float *from) {
    if ((size_t)from % std::min<size_t>(16, sizeof to)) fail("a load that is not aligned");
    perhaps_let_others_go_first();
    std::copy(from, from + COUNT, to);
}
__device__ __forceinline__ void before_copies() {
    for (u32 at : now->unfenced) now->block->unfenced[at] = false;
    now->unfenced.clear();
}

// ── hopper.cuh: numbers ─────────────────────────────────────────────────────────────────────────────────

static u32 bfloat16(float x) {
    const u32 bits = same_bits<u32>(x);
    return x != x ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

__device__ __forceinline__ u32 pair(float low, float high) { return bfloat16(low) | bfloat16(high) << 16; }
__device__ __forceinline__ float low(u32 both) { return same_bits<float>(both << 16); }
__device__ __forceinline__ float high(u32 both) { return same_bits<float>(both & 0xFFFF0000u); }
__device__ __forceinline__ float lowest() { return -INFINITY; }
__device__ __forceinline__ float power_of_2(float x) {
    const float y = exp2f(x);
    return y < 1.17549435e-38f ? 0.0f : y;  // as NaN is not less, it stays
}
__device__ __forceinline__ float inverse_root(float x) { return 1.0f / sqrtf(x); }

// ── hopper.cuh: tensor cores ────────────────────────────────────────────────────────────────────────────

struct Matrix { unsigned short at[8][8]; };

static u32 row_pair(const Matrix &m, u32 lane) {
    return m.at[lane / 4][lane % 4 * 2] | (u32)m.at[lane / 4][lane % 4 * 2 + 1] << 16;
}
static u32 column_pair(const Matrix &m, u32 lane) {
    return m.at[lane % 4 * 2][lane / 4] | (u32)m.at[lane % 4 * 2 + 1][lane / 4] << 16;
}
// Lanes 8 m … 8 m + 7 name the rows of matrix m.
static void load_four(const char *instruction, u32 (&a)[4], u32 from, u32 (*part)(const Matrix &, u32)) {
    u64 taken[4];
    shared_at(from, 16, 16);
    together<1>(instruction, {from}, taken, [part](Warp &warp) {
        for (u32 m = 0; m < 4; m++) {
            Matrix matrix;
            for (u32 r = 0; r < 8; r++) memcpy(matrix.at[r], &now->block->shared[warp.given[8 * m + r][0]], 16);
            for (u32 lane = 0; lane < LANES; lane++) warp.taken[lane][m] = part(matrix, lane);
        }
    });
    std::copy(taken, taken + 4, a);
}

__device__ __forceinline__ void load(u32 (&a)[4], u32 from) { load_four("ldmatrix", a, from, row_pair); }
__device__ __forceinline__ void load_transposed(u32 (&a)[4], u32 from) {
    load_four("ldmatrix.trans", a, from, column_pair);
}
__device__ __forceinline__ u32 transposed(u32 both) {
    u64 taken[1];
    together<1>("movmatrix", {both}, taken, [](Warp &warp) {
        Matrix matrix;
        for (u32 lane = 0; lane < LANES; lane++)
            for (u32 i = 0; i < 2; i++)
                matrix.at[lane / 4][lane % 4 * 2 + i] = (unsigned short)(warp.given[lane][0] >> 16 * i);
        for (u32 lane = 0; lane < LANES; lane++) warp.taken[lane][0] = column_pair(matrix, lane);
    });
    return (u32)taken[0];
}
// c (16, 8) += a (16, 16) · b (16, 8). Lane 4 g + t has of each quarter of a, and of each half of b's rows and of c,
// two neighbours: a's and c's in row g, b's in column g, at 2 t.
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const auto both = [](u32 first, u32 second) { return first | (u64)second << 32; };
    u64 taken[2];
    together<5>("mma",
                {both(a[0], a[1]), both(a[2], a[3]), both(b0, b1), both(same_bits<u32>(c[0]), same_bits<u32>(c[1])),
                 both(same_bits<u32>(c[2]), same_bits<u32>(c[3]))},
                taken, [both](Warp &warp) {
        float left[16][16], right[8][16];
        for (u32 lane = 0; lane < LANES; lane++) {
            const u32 g = lane / 4, t = lane % 4 * 2;
            for (u32 i = 0; i < 4; i++) {
                const u32 mine = (u32)(warp.given[lane][i / 2] >> i % 2 * 32);
                left[g + i % 2 * 8][t + i / 2 * 8] = low(mine), left[g + i % 2 * 8][t + i / 2 * 8 + 1] = high(mine);
            }
            for (u32 i = 0; i < 2; i++) {
                const u32 mine = (u32)(warp.given[lane][2] >> i * 32);
                right[g][t + i * 8] = low(mine), right[g][t + i * 8 + 1] = high(mine);
            }
        }
        for (u32 lane = 0; lane < LANES; lane++)
            for (u32 half = 0; half < 2; half++) {
                u32 sums[2];
                for (u32 i = 0; i < 2; i++) {
                    double sum = same_bits<float>((u32)(warp.given[lane][3 + half] >> i * 32));
                    for (u32 k = 0; k < 16; k++)
                        sum += (double)left[lane / 4 + half * 8][k] * right[lane % 4 * 2 + i][k];
                    sums[i] = same_bits<u32>((float)sum);
                }
                warp.taken[lane][half] = both(sums[0], sums[1]);
            }
    });
    for (u32 i = 0; i < 4; i++) c[i] = same_bits<float>((u32)(taken[i / 2] >> i % 2 * 32));
}

// ── The kernel ──────────────────────────────────────────────────────────────────────────────────────────

#include KERNEL

static_assert(ROOM_AT + 1024 + STAGES * (STAGE_BYTES + OPENING_BYTES) <= SHARED_BYTES, "the ring is larger than the model's memory");

// A launch's arguments and size.
struct Launch {
    Maps maps;
    const unsigned short *q;
    const int *table;
    const Item *items;
    const Merge *merges;
    unsigned short *out;
    float *partial, *statistics;
    Projected projected;
    int *counters, pieces, q_stride, out_stride, head_rows, table_stride;
    float scale;
    int blocks, threads;
};

// Of the kernel before the first launch.
struct Write {
    void *to;
    const void *from;
    u64 bytes;
};

static void phase_complete(Block &block, u32 barrier) {
    const u32 empty = VARIABLES_AT + offsetof(Shared, empty);
    if (barrier < empty || barrier >= empty + sizeof(Shared::empty)) return;
    // All have given the stage back: who still reads it finds no numbers, an end, and no key behind an item's last.
    const u32 stage = (barrier - empty) / sizeof(u64), ring = (ROOM_AT + 1023) & ~1023u;
    Shared &shared = *(Shared *)(block.shared.data() + VARIABLES_AT);
    memset(&block.shared[ring + stage * STAGE_BYTES], NO_NUMBER, STAGE_BYTES);
    memset(&block.shared[opening_of(ring, stage)], NO_NUMBER, OPENING_BYTES);
    memset(&shared.item[stage], 0, sizeof(Item));
    shared.piece[stage] = END, shared.begin[stage] = -(1 << 20);
}

static void live() {
    const Launch &launch = *now->block->grid->launch;
    attend_single(launch.maps, launch.q, launch.table, launch.items, launch.merges, launch.out, launch.partial,
                  launch.statistics, launch.projected, launch.counters, launch.pieces, launch.q_stride,
                  launch.out_stride, launch.head_rows, launch.table_stride, launch.scale);
    now->ended = true, now->block->running--;
    _longjmp(scheduler, 1);
}

// ── Running ─────────────────────────────────────────────────────────────────────────────────────────────

static void begin(Block &block) {
    const u32 threads = block.grid->threads;
    block.begun = true, block.running = threads;
    block.shared.assign(SHARED_BYTES, NO_NUMBER);
    block.unfenced.assign(SHARED_BYTES / 16, false);
    block.warps.resize(threads / LANES);
    for (size_t i = 0; i < block.warps.size(); i++) block.pauses.push_back(1 + roll(4));
    for (u32 thread = 0; thread < threads; thread++) {
        if (stacks.empty()) stacks.push_back((char *)malloc(STACK_BYTES));
        Fiber *fiber = new Fiber{&block, thread, stacks.back()};
        stacks.pop_back();
        fiber->watched = &ALWAYS, fiber->mask = 1, fiber->seen = 0;
        getcontext(&fiber->first);
        fiber->first.uc_stack.ss_sp = fiber->stack, fiber->first.uc_stack.ss_size = STACK_BYTES;
        fiber->first.uc_link = nullptr;
        makecontext(&fiber->first, live, 0);
        block.fibers.push_back(fiber);
    }
}

static void give_back(Block &block) {
    for (Fiber *fiber : block.fibers) {
        stacks.push_back(fiber->stack);
        delete fiber;
    }
    block.fibers.clear();
    block.shared = {};
}

static void go_on(Fiber &fiber) {
    now = &fiber;
    threadIdx.x = fiber.thread, blockIdx.x = fiber.block->index, gridDim.x = fiber.block->grid->blocks.size();
    if (_setjmp(scheduler)) {
        now = nullptr;
        return;
    }
    if (fiber.begun) _longjmp(fiber.here, 1);
    fiber.begun = true;
    setcontext(&fiber.first);
}

// One of the block's warps, its lanes in any order. Whether any of them went on.
static bool turn(Block &block) {
    const u32 warp = roll(block.warps.size());
    if (roll(block.pauses[warp])) return false;
    bool any = false;
    for (u32 i = 0; i < LANES; i++) {
        Fiber &fiber = *block.fibers[warp * LANES + (roll(2) ? i : roll(LANES))];
        if (fiber.ended || (*fiber.watched & fiber.mask) == fiber.seen) continue;
        any = true;
        go_on(fiber);
    }
    return any;
}

static void run_all(u32 resident, std::vector<Write> writes) {
    constexpr long LONG = 50'000'000, IDLE = 10'000;
    const u32 pace = 1 + roll(400);
    for (long turns = 0, idle = 0; !grids.back().complete; turns++) {
        if (turns == LONG) fail("there is no end to it");
        if (idle == IDLE) fail("all wait, and for nothing that will come");
        bool any = false;
        if (!grids[0].complete) {
            any = true;
            for (u32 many = roll(pace) ? 0 : 1 + roll(16); many && !writes.empty(); many--) {
                std::swap(writes[roll(writes.size())], writes.back());
                memcpy(writes.back().to, writes.back().from, writes.back().bytes);
                writes.pop_back();
            }
            if (writes.empty() && !roll(pace)) grids[0].complete = 1;
        }
        if (!copies.empty() && roll(2)) land(roll(copies.size())), any = true;

        u32 running = 0;
        for (Grid &grid : grids)
            for (Block &block : grid.blocks) running += block.running > 0;
        for (size_t i = 1; i < grids.size(); i++) {
            Grid &grid = grids[i];
            if (grid.complete || !(grid.before->complete || grid.before->lets_next_begin())) continue;
            bool ended = true;
            for (Block &block : grid.blocks) {
                if (!block.begun && running < resident && !roll(3)) begin(block), running++, any = true;
                ended &= block.ended();
                if (!block.ended() || block.fibers.empty()) continue;
                for (const Copy &copy : copies)
                    if (copy.block == &block) fail("a block ended before its copies had landed");
                give_back(block);
            }
            if (ended && !grid.before->complete) fail("a launch ended before the kernel before it");
            if (ended) grid.complete = 1, any = true;
        }
        for (Grid &grid : grids)
            for (Block &block : grid.blocks)
                if (block.running) any |= turn(block);
        idle = any ? 0 : idle + 1;
    }
}

// A kernel that makes these writes, then these launches, each after the one before it; at most `resident` blocks at a
// time. What went wrong, or null.
extern "C" const char *run(u32 seed, u32 resident, const Write *writes, int write_count, Launch *launches, int count) {
    dice = 0x9E3779B97F4A7C15ull * (seed + 1);
    fault[0] = 0, now = nullptr;
    copies.clear();
    grids = std::vector<Grid>(count + 1);
    for (int i = 0; i < count; i++) {
        Grid &grid = grids[i + 1];
        grid.launch = &launches[i], grid.before = &grids[i], grid.threads = launches[i].threads;
        grid.blocks.resize(launches[i].blocks);
        for (u32 b = 0; b < grid.blocks.size(); b++) grid.blocks[b].grid = &grid, grid.blocks[b].index = b;
    }
    if (!_setjmp(end_of_run)) run_all(resident, {writes, writes + write_count});
    for (int i = 0; i < count; i++)
        for (Block &block : grids[i + 1].blocks) give_back(block);
    return fault[0] ? fault : nullptr;
}
