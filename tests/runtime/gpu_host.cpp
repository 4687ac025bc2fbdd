// gpu_kernel.cu as a library of the host: `run_grid` runs its thread blocks as threads.

#include <chrono>
#include <thread>
#include <vector>

static void pause_thread() { std::this_thread::yield(); }
static unsigned long long nanoseconds() {
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

#include "gpu_kernel.cu"

extern "C" void run_grid(const Call *call, int blocks) {
    std::vector<std::thread> threads;
    for (int block = 0; block < blocks; ++block)
        threads.emplace_back([call, block, blocks] {
            blockIdx.x = block, gridDim.x = blocks;
            interpret(*call);
        });
    for (auto &thread : threads) thread.join();
}
