/*
 * threads ROUNDS: all that several threads may do at a time with the handles of one image: blocking
 * calls, queues of their own, one queue that one thread fills and another empties, snapshots,
 * questions, and jobs that others look at and cancel. Every block says who wrote it, and when.
 */
#include <cowslip.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BLOCK = 4096, BLOCKS = 64, WRITERS = 3, QUEUES = 2, DISK = 8 << 20, ROUNDS_MAX = 1000 };

#include "check.h"

static cowslip_image *image;
static unsigned rounds;

/* The first byte of a part of the disk: each thread has one for itself. */
static uint64_t part(unsigned number, unsigned block)
{
    return ((uint64_t)number * BLOCKS + block) * BLOCK;
}

static int is_filled(const unsigned char *block, unsigned char with)
{
    for (unsigned at = 0; at < BLOCK; at++)
        if (block[at] != with)
            return 0;
    return 1;
}

/* Blocking calls. */
static void *writer(void *number)
{
    unsigned mine = *(unsigned *)number;
    unsigned char block[BLOCK];
    cowslip_error *error = NULL;

    for (unsigned round = 0; round < rounds; round++) {
        unsigned char value = (unsigned char)(mine * 31 + round + 1);

        memset(block, value, sizeof block);
        for (unsigned at = 0; at < BLOCKS; at += 3)
            CHECK(cowslip_write(image, part(mine, at), block, sizeof block, &error) == 0);
        CHECK(cowslip_flush(image, &error) == 0);
        for (unsigned at = 0; at < BLOCKS; at += 3) {
            CHECK(cowslip_read(image, part(mine, at), block, sizeof block, &error) == 0);
            CHECK(is_filled(block, value));
        }
        CHECK(cowslip_discard(image, part(mine, 0), BLOCK, &error) == 0);
    }
    return NULL;
}

/* Waits until a queue has completed as many requests, all of them without an error. */
static void await(const cowslip_queue *queue, unsigned count)
{
    struct pollfd wait = { .fd = cowslip_queue_fd(queue), .events = POLLIN };
    cowslip_completion done[16];
    cowslip_error *error = NULL;

    while (count > 0) {
        uint64_t events;
        size_t some;

        CHECK(poll(&wait, 1, 60000) == 1);
        CHECK(read(wait.fd, &events, sizeof events) == sizeof events);
        while ((some = cowslip_queue_complete(queue, done, 16)) > 0) {
            for (size_t at = 0; at < some; at++)
                CHECK(done[at].result == 0);
            count -= (unsigned)some;
        }
    }
}

/* Requests for all blocks of a part, in a memory of as many. */
static void submit(const cowslip_queue *queue, uint32_t operation, unsigned mine,
                   unsigned char *memory)
{
    cowslip_request requests[BLOCKS];
    struct iovec iov[BLOCKS];
    cowslip_error *error = NULL;

    for (unsigned at = 0; at < BLOCKS; at++) {
        iov[at] = (struct iovec){ .iov_base = memory + at * BLOCK, .iov_len = BLOCK };
        requests[at] = (cowslip_request){
            .operation = operation,
            .offset = part(mine, at),
            .iov = &iov[at],
            .iov_count = 1,
            .cookie = at,
        };
    }
    CHECK(cowslip_queue_submit(queue, requests, BLOCKS, &error) == 0);
}

/* A queue of its own. */
static void *submitter(void *number)
{
    unsigned mine = *(unsigned *)number;
    unsigned char *memory = malloc(BLOCKS * BLOCK);
    cowslip_error *error = NULL;
    cowslip_queue *queue = NULL;

    CHECK(memory && cowslip_queue_new(image, &queue, &error) == 0);
    for (unsigned round = 0; round < rounds; round++) {
        memset(memory, (int)(round + mine), BLOCKS * BLOCK);
        submit(queue, COWSLIP_WRITE, mine, memory);
        await(queue, BLOCKS);
        memset(memory, 0xff, BLOCKS * BLOCK);
        submit(queue, COWSLIP_READ, mine, memory);
        await(queue, BLOCKS);
        for (unsigned at = 0; at < BLOCKS; at++)
            CHECK(is_filled(memory + at * BLOCK, (unsigned char)(round + mine)));
    }
    cowslip_queue_free(queue);
    free(memory);
    return NULL;
}

/* One queue of two threads: one fills it, the other one empties it. */
static cowslip_queue *shared;

static void *receiver(void *unused)
{
    (void)unused;
    await(shared, rounds * BLOCKS);
    return NULL;
}

static void *filler(void *number)
{
    unsigned mine = *(unsigned *)number;
    unsigned char *memory = malloc(BLOCKS * BLOCK);
    pthread_t other;
    cowslip_error *error = NULL;

    CHECK(memory && cowslip_queue_new(image, &shared, &error) == 0);
    CHECK(pthread_create(&other, NULL, receiver, NULL) == 0);
    memset(memory, 7, BLOCKS * BLOCK);
    for (unsigned round = 0; round < rounds; round++)
        submit(shared, COWSLIP_WRITE, mine, memory);
    CHECK(pthread_join(other, NULL) == 0);
    cowslip_queue_free(shared);
    free(memory);
    return NULL;
}

/* Snapshots come and go, and questions are asked. */
static void *onlooker(void *unused)
{
    cowslip_error *error = NULL;
    (void)unused;

    for (unsigned round = 0; round < rounds; round++) {
        cowslip_snapshots *list = NULL;
        cowslip_extent extent;
        char name[32];

        snprintf(name, sizeof name, "round %u", round);
        CHECK(cowslip_snapshot_create(image, name, NULL, &error) == 0);
        CHECK(cowslip_snapshot_list(image, &list, &error) == 0);
        CHECK(cowslip_snapshots_count(list) == 1);
        CHECK(strcmp(cowslip_snapshot_name(list, 0), name) == 0);
        cowslip_snapshots_free(list);
        for (uint64_t at = 0; at < cowslip_size(image); at = extent.start + extent.length)
            CHECK(cowslip_next_extent(image, at, &extent, &error) == 0);
        CHECK(cowslip_snapshot_delete(image, name, NULL, &error) == 0);
    }
    return NULL;
}

static void progressed(void *user, const cowslip_progress *progress)
{
    *(uint64_t *)user = progress->done_bytes;
}

/* A job that one thread waits for, another one looks at and may cancel. */
struct conversion {
    cowslip_image *target;
    cowslip_job *job;
    int result;
};

static void *convert(void *user)
{
    struct conversion *conversion = user;
    cowslip_error *error = NULL;

    conversion->result =
        cowslip_convert(image, conversion->target, 0, conversion->job, &error);
    cowslip_error_free(error);
    return NULL;
}

static void *jobs(void *unused)
{
    cowslip_create_options create = {
        .size = sizeof create, .flags = COWSLIP_CREATE_REPLACE, .disk_size = DISK };
    cowslip_open_options open = {
        .size = sizeof open, .flags = COWSLIP_OPEN_WRITABLE, .format = "qcow2" };
    cowslip_error *error = NULL;
    (void)unused;

    for (unsigned round = 0; round < rounds; round++) {
        struct conversion conversion = { 0 };
        pthread_t other;
        uint64_t reported = 0;

        CHECK(cowslip_create("target.qcow2", &create, NULL, &error) == 0);
        CHECK(cowslip_open("target.qcow2", &open, &conversion.target, &error) == 0);
        CHECK(cowslip_job_new(progressed, &reported, &conversion.job, &error) == 0);
        CHECK(pthread_create(&other, NULL, convert, &conversion) == 0);
        for (unsigned look = 0; look < 100; look++)
            CHECK(cowslip_job_get(conversion.job).done_bytes <= DISK);
        if (round % 2)
            cowslip_job_cancel(conversion.job);
        CHECK(pthread_join(other, NULL) == 0);
        CHECK(conversion.result == 0 || round % 2);
        CHECK(reported <= DISK);
        cowslip_job_free(conversion.job);
        CHECK(cowslip_close(conversion.target, &error) == 0);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    cowslip_create_options create = { .size = sizeof create, .disk_size = DISK };
    cowslip_open_options open = {
        .size = sizeof open,
        .flags = COWSLIP_OPEN_WRITABLE | COWSLIP_OPEN_DISCARD,
        .format = "qcow2",
    };
    pthread_t all[WRITERS + QUEUES + 3];
    unsigned numbers[WRITERS + QUEUES + 1], count = 0;
    cowslip_check_result result;
    cowslip_error *error = NULL;

    if (argc != 2 || (rounds = (unsigned)atoi(argv[1])) == 0 || rounds > ROUNDS_MAX)
        return 2;
    CHECK(cowslip_create("threads.qcow2", &create, NULL, &error) == 0);
    CHECK(cowslip_open("threads.qcow2", &open, &image, &error) == 0);
    for (; count < WRITERS + QUEUES + 1; count++) {
        void *(*work)(void *) =
            count < WRITERS ? writer : count < WRITERS + QUEUES ? submitter : filler;

        numbers[count] = count;
        CHECK(pthread_create(&all[count], NULL, work, &numbers[count]) == 0);
    }
    CHECK(pthread_create(&all[count++], NULL, onlooker, NULL) == 0);
    CHECK(pthread_create(&all[count++], NULL, jobs, NULL) == 0);
    while (count-- > 0)
        CHECK(pthread_join(all[count], NULL) == 0);
    CHECK(cowslip_close(image, &error) == 0);
    CHECK(cowslip_check("threads.qcow2", NULL, NULL, &result, &error) == 0);
    CHECK(result.corruptions == 0 && result.leaks == 0 && result.errors == 0);
    return 0;
}
