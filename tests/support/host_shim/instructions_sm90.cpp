#include "cuda_on_host.h"
#include "formats_on_host.h"
#include "instructions_sm90.cuh"

#include <deque>
#include <map>
#include <vector>

int late = 0;
int dynamic_bytes = 0;

namespace sm90 {
constexpr u32 MEMORY = 232448, NOBODY = 0xffffffffu;
/* As tests/support/host_kernels.py writes it. */
struct Map {
    u8* address;
    long long rows, columns, row_bytes;
    int box_rows, box_columns, element_bytes;
};
struct Phase {
    unsigned arrivals = 0, missing = 0, parity = 0;
    long long bytes = 0;
};
struct Load {
    u32 block, target, barrier;
    Map map;
    int row, column;
};
struct Store {
    Map map;
    u32 block, source;
    int row, column;
};
static std::vector<std::vector<u8>> memory;
/* The thread that has written a word which the copy engine does not see yet. */
static std::vector<std::vector<u32>> unseen;
static std::vector<std::vector<u32>> unseen_of;
static std::vector<std::map<u32, Phase>> phases;
static std::deque<Load> loads;
static std::vector<std::deque<std::vector<Store>>> stores;
static std::vector<std::deque<std::vector<Product>>> products;
static host::Barrier of_cluster;
static std::map<u32, host::Barrier> of_warpgroup;

using host::block;

static void start() {
    const u32 threads = host::blocks * blockDim.x;
    // neither zero nor small, so that reads of unwritten memory change the result
    memory.assign(host::blocks, std::vector<u8>(MEMORY, 0x7e));
    unseen.assign(host::blocks, std::vector<u32>(MEMORY / 4, NOBODY));
    phases.assign(host::blocks, {});
    unseen_of.assign(threads, {});
    stores.assign(threads, {{}});
    products.assign(threads, {});
    loads.clear();
    of_cluster = host::Barrier();
    of_warpgroup.clear();
}

static u8* at(u32 block, u32 address, u32 bytes) {
    if (address % std::min(bytes, 16u) != 0 || address + bytes > (u32)dynamic_bytes) host::fail("shared memory that is not there");
    return &memory[block][address];
}
static void write(u32 address, const void* value, u32 bytes) {
    std::memcpy(at(block(), address, bytes), value, bytes);
    for (u32 word = address / 4; word < (address + bytes) / 4; ++word) {
        unseen[block()][word] = host::current;
        unseen_of[host::current].push_back(word);
    }
}
static u32 swizzled(u32 address) { return address ^ ((address >> 7 & 7) << 4); }

static Phase& phase(u32 block, u32 barrier) {
    if (host::has_ended(block)) host::fail("a barrier in shared memory of a block that has ended");
    const auto found = phases[block].find(barrier);
    if (found == phases[block].end()) host::fail("a barrier that is not initialised");
    return found->second;
}
static void settle(Phase& phase) {
    host::progress = true;
    if (phase.missing != 0 || phase.bytes != 0) return;
    phase.parity ^= 1;
    phase.missing = phase.arrivals;
}
static void arrive(Phase& phase) {
    if (phase.missing == 0) host::fail("more arrivals than a phase waits for");
    --phase.missing;
}

static bool inside(const Map& map, long long row, long long column) {
    return row >= 0 && row < map.rows && column >= 0 && column < map.columns;
}
static Map read(const TensorMap& map) {
    Map result;
    std::memcpy(&result, &map, sizeof(result));
    return result;
}
static void perform(const Load& load) {
    const Map& map = load.map;
    const u32 row_bytes = map.box_columns * map.element_bytes, elements = map.box_columns;
    if (load.target % 1024 != 0 || row_bytes != 128) host::fail("a box that is not aligned to its swizzle");
    for (int r = 0; r < map.box_rows; ++r)
        for (u32 c = 0; c < elements; ++c)
            for (int byte = 0; byte < map.element_bytes; ++byte) {
                const u32 offset = c * map.element_bytes + byte;
                const u8* source = map.address + (load.row + r) * map.row_bytes + (long long)load.column * map.element_bytes;
                memory[load.block][swizzled(load.target + r * row_bytes + offset)] =
                    inside(map, load.row + r, load.column + c) ? source[offset] : 0;
            }
    Phase& full = phase(load.block, load.barrier);
    full.bytes -= map.box_rows * row_bytes;
    settle(full);
}
static void perform(const Store& store) {
    const Map& map = store.map;
    const u32 row_bytes = map.box_columns * map.element_bytes;
    if (store.source % 1024 != 0 || row_bytes != 128) host::fail("a box that is not aligned to its swizzle");
    for (int r = 0; r < map.box_rows; ++r)
        for (u32 offset = 0; offset < row_bytes; ++offset) {
            const long long column = store.column + offset / map.element_bytes;
            if (inside(map, store.row + r, column))
                map.address[(store.row + r) * map.row_bytes + (long long)store.column * map.element_bytes + offset] =
                    memory[store.block][swizzled(store.source + r * row_bytes + offset)];
        }
}
static void ask(const Load& load) {
    if (late) loads.push_back(load);
    else perform(load);
}
/* The oldest copy that has not been done yet. */
static bool load_one() {
    if (loads.empty()) return false;
    const Load load = loads.front();
    loads.pop_front();
    perform(load);
    return true;
}
static const bool prepared = (host::at_start = start, host::when_stuck = load_one, true);

/* 32 values of K of one row of an operand. */
struct Row {
    float values[32];
    short exponents[32];
    Row(u64 operand, u32 index, const Values& all) {
        const u32 start = (u32)(operand & 0x3fff) << 4, group_bytes = (u32)(operand >> 32 & 0x3fff) << 4;
        const u32 address = start + index / 8 * group_bytes + index % 8 * 128;
        for (u32 chunk = 0; chunk < 32; chunk += 16) {
            const u8* codes = at(block(), swizzled(address + chunk), 16);
            for (u32 k = 0; k < 16; ++k) {
                values[chunk + k] = all.of[codes[k]];
                exponents[chunk + k] = all.exponents[codes[k]];
            }
        }
    }
};

static void perform(const Product& product) {
    const u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
    const Values &a_values = values(product.a_format), &b_values = values(product.b_format);
    const Row a[2] = {Row(product.a, row, a_values), Row(product.a, row + 8, a_values)};
    for (int i = 0; i < product.columns / 4; ++i) {
        const Row b(product.b, i / 2 * 8 + lane % 4 * 2 + i % 2, b_values);
        for (u32 h = 0; h < 2; ++h) {
            float& sum = product.sums[i / 2 * 4 + h * 2 + i % 2];
            sum = accumulate<32, 13, 13>(product.fresh ? 0.0f : sum, a[h].values, a[h].exponents, b.values, b.exponents);
        }
    }
}

void multiply(const Product& product) { products[host::current].back().push_back(product); }
/* The whole warpgroup waits, as its warps execute the instruction together. */
void wait_for_products(u32 pending) {
    host::lag();
    auto& groups = products[host::current];
    for (; groups.size() > pending; groups.pop_front())
        for (const Product& product : groups.front()) perform(product);
    host::wait(of_warpgroup[block() * 16 + 8 + threadIdx.x / 128], 128);
}
/* The newest entry is the group that is not committed yet. */
void wait_for_stores(u32 pending) {
    auto& groups = stores[host::current];
    for (; groups.size() > pending + 1; groups.pop_front())
        for (const Store& store : groups.front()) perform(store);
}
void wait_for_cluster() { host::wait(of_cluster, host::blocks * blockDim.x); }
}  // namespace sm90

void store_shared(u32 address, float value) { sm90::write(address, &value, 4); }
void store_shared_pair(u32 address, float first, float second) {
    const float both[2] = {first, second};
    sm90::write(address, both, 8);
}
float2 load_shared_pair(u32 address) {
    float2 values;
    std::memcpy(&values, sm90::at(sm90::block(), address, 8), 8);
    return values;
}
/* Thread l's addresses and elements are read by the threads that write: row r of matrix i by thread 8 i + r. */
void store_matrices(u32 address, u32 first, u32 second, u32 third, u32 fourth) {
    const u32 words[4] = {first, second, third, fourth}, lane = threadIdx.x % 32;
    u16 row[8];
    for (u32 i = 0; i < 4; ++i) {
        const unsigned* all = exchange(words[i]);
        if (lane / 8 == i)
            for (u32 k = 0; k < 8; ++k) row[k] = (u16)(all[4 * (lane % 8) + k / 2] >> (16 * (k % 2)));
    }
    sm90::write(address, row, 16);
    exchange(0);
}

void barrier_init(u32 barrier, u32 arrivals) {
    sm90::at(sm90::block(), barrier, 8);
    sm90::Phase phase;
    phase.arrivals = phase.missing = arrivals;
    sm90::phases[sm90::block()][barrier] = phase;
}
void barrier_expect(u32 barrier, u32 bytes) {
    sm90::Phase& phase = sm90::phase(sm90::block(), barrier);
    phase.bytes += bytes;
    sm90::arrive(phase);
    sm90::settle(phase);
}
void barrier_arrive(u32 barrier, u32 block) {
    sm90::Phase& phase = sm90::phase(block, barrier);
    sm90::arrive(phase);
    sm90::settle(phase);
}
void barrier_wait(u32 barrier, u32 parity) {
    while (sm90::phase(sm90::block(), barrier).parity == parity) host::yield();
}
void warpgroup_sync(int consumer) {
    host::wait(sm90::of_warpgroup[sm90::block() * 16 + consumer], 128);
}
u32 block_in_cluster() { return sm90::block(); }

void load_box(u32 target, const TensorMap& map, u32 barrier, int row, int column) {
    sm90::ask({sm90::block(), target, barrier, sm90::read(map), row, column});
}
void load_box_for(u16 blocks, u32 target, const TensorMap& map, u32 barrier, int row, int column) {
    for (u32 block = 0; block < host::blocks; ++block)
        if (blocks >> block & 1) sm90::ask({block, target, barrier, sm90::read(map), row, column});
}
void store_box(const TensorMap& map, u32 source, int row, int column) {
    const sm90::Store store = {sm90::read(map), sm90::block(), source, row, column};
    for (u32 word = source / 4; word < (source + store.map.box_rows * 128) / 4; ++word)
        if (sm90::unseen[sm90::block()][word] != sm90::NOBODY) host::fail("a copy of what no fence has made visible");
    if (late) sm90::stores[host::current].back().push_back(store);
    else sm90::perform(store);
}
void store_commit() {
    if (late) sm90::stores[host::current].emplace_back();
}
void fence_for_copy_engine() {
    for (u32 word : sm90::unseen_of[host::current]) {
        u32& writer = sm90::unseen[sm90::block()][word];
        if (writer == host::current) writer = sm90::NOBODY;
    }
    sm90::unseen_of[host::current].clear();
}

void mma_fence() { sm90::products[host::current].push_back({}); }
