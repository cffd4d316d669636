/*
 * toy_vmm IMAGE: the block device of a VMM, without the rest. A guest, played by main, puts requests
 * for its memory into a ring; the event loop submits them in batches, sleeps on the queue's eventfd
 * beside whatever else it waits for, and reports completions back. No byte is copied on the way.
 */
#include <cowslip.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SLOTS = 64, BLOCK = 4096, BLOCKS = 1024 };

struct device {
    cowslip_image *image;
    cowslip_queue *queue;
    unsigned char *memory; /* the guest's: a block for each slot */
    unsigned in_flight;
    unsigned failed;
};

static int stop(const char *what, cowslip_error *error)
{
    fprintf(stderr, "%s: %s\n", what, error ? cowslip_error_message(error) : "failed");
    cowslip_error_free(error);
    return 1;
}

/* What the guest wants of the blocks [first, first + count), one request each. */
static int submit(struct device *device, uint32_t operation, unsigned first, unsigned count)
{
    cowslip_request requests[SLOTS];
    struct iovec iov[SLOTS];
    cowslip_error *error = NULL;

    for (unsigned slot = 0; slot < count; slot++) {
        iov[slot].iov_base = device->memory + slot * BLOCK;
        iov[slot].iov_len = BLOCK;
        requests[slot] = (cowslip_request){
            .operation = operation,
            .offset = (uint64_t)(first + slot) * BLOCK,
            .iov = &iov[slot],
            .iov_count = 1,
            .cookie = slot,
        };
    }
    if (cowslip_queue_submit(device->queue, requests, count, &error) != 0)
        return stop("submit", error);
    device->in_flight += count;
    return 0;
}

/* The event loop, until the device is idle. */
static int run(struct device *device)
{
    struct pollfd wait = { .fd = cowslip_queue_fd(device->queue), .events = POLLIN };
    cowslip_completion completions[16];
    uint64_t events;

    while (device->in_flight > 0) {
        if (poll(&wait, 1, 30000) != 1)
            return stop("poll", NULL);
        if (read(wait.fd, &events, sizeof events) < 0)
            continue;
        size_t count;
        while ((count = cowslip_queue_complete(device->queue, completions, 16)) > 0) {
            for (size_t at = 0; at < count; at++)
                device->failed += completions[at].result != 0;
            device->in_flight -= (unsigned)count;
        }
    }
    return device->failed ? stop("requests", NULL) : 0;
}

static int guest(struct device *device)
{
    cowslip_request flush = { .operation = COWSLIP_FLUSH };
    cowslip_error *error = NULL;

    for (unsigned first = 0; first < BLOCKS; first += SLOTS) {
        for (unsigned slot = 0; slot < SLOTS; slot++)
            memset(device->memory + slot * BLOCK, (int)(first + slot) % 251 + 1, BLOCK);
        if (submit(device, COWSLIP_WRITE, first, SLOTS) || run(device))
            return 1;
    }
    if (cowslip_queue_submit(device->queue, &flush, 1, &error) != 0)
        return stop("flush", error);
    device->in_flight++;
    if (run(device))
        return 1;
    for (unsigned first = 0; first < BLOCKS; first += SLOTS) {
        memset(device->memory, 0, SLOTS * BLOCK);
        if (submit(device, COWSLIP_READ, first, SLOTS) || run(device))
            return 1;
        for (unsigned at = 0; at < SLOTS * BLOCK; at++)
            if (device->memory[at] != (first + at / BLOCK) % 251 + 1)
                return stop("compare", NULL);
    }
    return 0;
}

int main(int argc, char **argv)
{
    struct device device = { 0 };
    cowslip_error *error = NULL;
    cowslip_open_options options = {
        .size = sizeof options,
        .flags = COWSLIP_OPEN_WRITABLE | COWSLIP_OPEN_DISCARD,
        .format = "qcow2",
    };
    int status;

    if (argc != 2)
        return 2;
    device.memory = mmap(NULL, SLOTS * BLOCK, PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (device.memory == MAP_FAILED)
        return stop("mmap", NULL);
    if (cowslip_open(argv[1], &options, &device.image, &error) != 0)
        return stop("open", error);
    if (cowslip_queue_new(device.image, &device.queue, &error) != 0)
        status = stop("queue", error);
    else
        status = guest(&device);
    cowslip_queue_free(device.queue);
    if (cowslip_close(device.image, &error) != 0)
        status = stop("close", error);
    munmap(device.memory, SLOTS * BLOCK);
    return status;
}
