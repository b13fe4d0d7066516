// A model of CUDA on the CPU, as far as kernels for Hopper need it: threads, blocks, launches, what a warp does together.
// emulated_hopper.h goes on from here.
//
// Every thread of every block is a fiber, and chance decides which goes on. What the device does not promise does not
// hold here either:
//   - copies land late and in any order, and the bytes of one that has not landed are no numbers;
//   - what a lane clears the others see when they have met;
//   - a stage that was given back is no numbers from then on;
//   - blocks begin late, only so many at a time, and one of the next launch as soon as this one lets it;
//   - the kernel before the first launch writes what it writes slowly, and in any order.
// What the device forbids ends the run with words that say what it was: lanes at different instructions of a warp, too
// many arrivals, addresses outside shared memory, copies over writes that no fence keeps before them, waiting forever.

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
using std::max;
using std::min;

typedef unsigned int u32;
typedef unsigned long long u64;

// What a copy is told of a matrix of bfloat16. As large as the device's.
struct TensorMap {
    const unsigned short *matrix;
    u64 rows, columns, box_rows, unused[12];
};

constexpr int LINE = 128;
constexpr u64 READ_ONCE = 0, READ_AGAIN = 1;  // nothing is cached here
constexpr u32 ALL = 0xFFFFFFFFu;

// ── Chance ──────────────────────────────────────────────────────────────────────────────────────────────

static u64 dice;

static u32 roll(u32 sides) {
    dice ^= dice >> 12, dice ^= dice << 25, dice ^= dice >> 27;
    return (u32)(dice * 0x2545F4914F6CDD1Dull >> 33) % sides;
}

// ── Threads, blocks, launches ───────────────────────────────────────────────────────────────────────────

constexpr u32 LANES = 32, STACK_BYTES = 1 << 16;
// Of a block's shared memory. The dynamic part begins at a multiple of 16 and of no more.
constexpr u32 VARIABLES_AT = 448, ROOM_AT = 16384 + 80, SHARED_BYTES = 1 << 17;
constexpr int NO_NUMBER = 0xFF;  // the byte of which float and bfloat16 make no number

struct Launch;
struct Block;

struct Fiber {
    Block *block;
    u32 thread;
    char *stack;
    ucontext_t first;
    jmp_buf here;
    bool begun = false, ended = false;
    const u32 *watched;  // goes on when the bits of `mask` there are no longer `seen`
    u32 mask, seen;
    std::vector<u32> unseen;    // where it wrote what the other lanes do not see yet
    std::vector<u32> unfenced;  // where it wrote since its last fence before copies
};

struct Barrier {
    u32 arrivals, missing, phase;
    long long bytes;  // that are still to land in this phase
    bool published;
};

// Where threads wait for each other: `times` counts how often all have come.
struct Meeting { u32 present = 0, times = 0; };

struct Warp {
    Meeting meeting;
    const char *instruction;
    u64 given[LANES][5], taken[LANES][4];
};

struct Grid;

struct Block {
    Grid *grid;
    u32 index, running = 0;
    bool begun = false, lets_next_begin = false;
    std::vector<unsigned char> shared;
    std::vector<bool> unfenced;  // by 16 bytes
    std::vector<Fiber *> fibers;
    std::vector<Warp> warps;
    std::vector<u32> pauses;  // of each warp: some are slower than others
    std::map<u32, Barrier> barriers;
    Meeting all, some;

    bool ended() const { return begun && !running; }
};

struct Grid {
    Launch *launch = nullptr;  // null: the kernel before the first launch
    Grid *before = nullptr;
    u32 complete = 0, threads = 0;
    std::vector<Block> blocks;

    bool lets_next_begin() const {
        for (const Block &block : blocks)
            if (!block.lets_next_begin && !block.ended()) return false;
        return true;
    }
};

struct Copy {
    Block *block;
    TensorMap from;
    u32 to, barrier;
    int column, row;
    const void *bytes_from = nullptr;  // these as they are, and no tile
    u32 bytes = 0;
};

static std::vector<Grid> grids;
static std::vector<Copy> copies;  // under way
static std::vector<char *> stacks;  // of fibers that have ended
static Fiber *now;
static jmp_buf scheduler, end_of_run;
static char fault[256];
static const u32 ALWAYS = 1;

static struct { u32 x; } threadIdx, blockIdx, gridDim;

[[noreturn]] static void fail(const char *what) {
    if (now)
        snprintf(fault, sizeof fault, "%s (launch %d, block %u, thread %u)", what,
                 (int)(now->block->grid - grids.data()), now->block->index, now->thread);
    else
        snprintf(fault, sizeof fault, "%s", what);
    _longjmp(end_of_run, 1);
}

static void wait_while(const u32 *watched, u32 mask, u32 seen) {
    now->watched = watched, now->mask = mask, now->seen = seen;
    if (!_setjmp(now->here)) _longjmp(scheduler, 1);
}

static void perhaps_let_others_go_first() {
    if (!roll(4)) wait_while(&ALWAYS, 1, 0);
}

static void meet(Meeting &meeting, u32 threads) {
    const u32 times = meeting.times;
    if (++meeting.present == threads)
        meeting.present = 0, meeting.times++;
    else
        wait_while(&meeting.times, ALL, times);
}

// An instruction that the lanes of a warp execute together: the last that comes computes what all of them take.
template <int GIVEN, int TAKEN, class Compute>
static void together(const char *instruction, const u64 (&given)[GIVEN], u64 (&taken)[TAKEN], Compute compute) {
    Warp &warp = now->block->warps[now->thread / LANES];
    const u32 lane = now->thread % LANES;
    if (warp.meeting.present && strcmp(warp.instruction, instruction)) {
        char words[100];
        snprintf(words, sizeof words, "lanes of a warp at %s and at %s", warp.instruction, instruction);
        fail(words);
    }
    warp.instruction = instruction;
    std::copy(given, given + GIVEN, warp.given[lane]);
    if (warp.meeting.present == LANES - 1) compute(warp);
    meet(warp.meeting, LANES);
    std::copy(warp.taken[lane], warp.taken[lane] + TAKEN, taken);
}

// ── What CUDA has built in ──────────────────────────────────────────────────────────────────────────────

template <class To, class From> static To same_bits(From from) {
    To to{};
    memcpy(&to, &from, std::min(sizeof to, sizeof from));
    return to;
}

template <class T> static T __shfl_sync(u32, T mine, int lane) {
    u64 taken[1];
    together<2>("shfl", {same_bits<u64>(mine), (u64)lane}, taken, [](Warp &warp) {
        for (u32 i = 0; i < LANES; i++) warp.taken[i][0] = warp.given[warp.given[i][1] % LANES][0];
    });
    return same_bits<T>(taken[0]);
}
template <class T> static T __shfl_xor_sync(u32, T mine, int other) {
    u64 taken[1];
    together<2>("shfl.xor", {same_bits<u64>(mine), (u64)other}, taken, [](Warp &warp) {
        for (u32 i = 0; i < LANES; i++) warp.taken[i][0] = warp.given[(i ^ warp.given[i][1]) % LANES][0];
    });
    return same_bits<T>(taken[0]);
}
static bool __any_sync(u32, bool mine) {
    u64 taken[1];
    together<1>("vote.any", {mine}, taken, [](Warp &warp) {
        bool any = false;
        for (u32 i = 0; i < LANES; i++) any |= warp.given[i][0] != 0;
        for (u32 i = 0; i < LANES; i++) warp.taken[i][0] = any;
    });
    return taken[0];
}
static void __syncwarp() {
    u64 taken[1];
    for (u32 place : now->unseen) memset(&now->block->shared[place], 0, 16);
    now->unseen.clear();
    together<1>("syncwarp", {0}, taken, [](Warp &) {});
}
static void __syncthreads() { meet(now->block->all, now->block->grid->threads); }
static void __threadfence() {}
static int atomicAdd(int *to, int amount) {
    perhaps_let_others_go_first();
    const int before = *to;
    *to += amount;
    perhaps_let_others_go_first();
    return before;
}
