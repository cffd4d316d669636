/* Calls that make no sense are errors with words, and the files of an image are the caller's. */
#include <cowslip.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

static cowslip_error *error;

/* An error of a kind, and nothing else. */
static int is(int result, int kind)
{
    int right = result < 0 && error && cowslip_error_kind(error) == kind &&
                cowslip_error_errno(error) == -result && strlen(cowslip_error_message(error)) > 3;

    if (right) {
        cowslip_error_free(error);
        error = NULL;
    }
    return right;
}

static unsigned asked;

static int open_file(void *user, const cowslip_naming *naming)
{
    ++*(unsigned *)user;
    if (strstr(naming->name, "base") && getenv("REFUSE"))
        return -EACCES;
    return open(naming->name, (naming->writable ? O_RDWR : O_RDONLY) | O_CLOEXEC);
}

static void *write_many(void *image)
{
    static unsigned next;
    unsigned number = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
    unsigned char block[512];

    memset(block, (int)number + 1, sizeof block);
    for (unsigned at = 0; at < 50; at++)
        if (cowslip_write(image, (number * 50 + at) * 512ull, block, sizeof block, NULL))
            return image;
    return NULL;
}

static void threads(cowslip_image *image)
{
    pthread_t all[4];
    unsigned char block[512];
    void *wrong;

    for (int at = 0; at < 4; at++)
        CHECK(pthread_create(&all[at], NULL, write_many, image) == 0);
    for (int at = 0; at < 4; at++)
        CHECK(pthread_join(all[at], &wrong) == 0 && wrong == NULL);
    for (unsigned at = 0; at < 200; at++) {
        CHECK(cowslip_read(image, at * 512ull, block, sizeof block, &error) == 0);
        CHECK(block[0] == at / 50 + 1 && block[511] == at / 50 + 1);
    }
}

static void snapshots(cowslip_image *image)
{
    cowslip_snapshots *list = NULL;
    char byte = 0;

    CHECK(cowslip_snapshot_create(image, "before", NULL, &error) == 0);
    CHECK(cowslip_write(image, 0, "x", 1, &error) == 0);
    CHECK(cowslip_snapshot_list(image, &list, &error) == 0);
    CHECK(cowslip_snapshots_count(list) == 1 && !cowslip_snapshot_name(list, 1));
    CHECK(strcmp(cowslip_snapshot_name(list, 0), "before") == 0);
    CHECK(cowslip_snapshot_apply(image, cowslip_snapshot_id(list, 0), NULL, &error) == 0);
    cowslip_snapshots_free(list);
    CHECK(cowslip_read(image, 0, &byte, 1, &error) == 0 && byte == 1);
    CHECK(is(cowslip_snapshot_delete(image, "none", NULL, &error), COWSLIP_ERROR_IO));
    CHECK(cowslip_snapshot_delete(image, "before", NULL, &error) == 0);
}

static void nonsense(cowslip_image *image)
{
    cowslip_open_options later[2];
    cowslip_extent extent;
    cowslip_request request = { .operation = 77 };
    cowslip_image *other = NULL;

    CHECK(is(cowslip_open(NULL, NULL, &other, &error), COWSLIP_ERROR_INVALID));
    CHECK(is(cowslip_open("\xff", NULL, &other, &error), COWSLIP_ERROR_INVALID));
    CHECK(is(cowslip_open("/nonexistent", NULL, &other, &error), COWSLIP_ERROR_OPENING));
    CHECK(cowslip_open("/nonexistent", NULL, &other, NULL) < 0 && !other);
    CHECK(is(cowslip_read(NULL, 0, &extent, 1, &error), COWSLIP_ERROR_INVALID));
    CHECK(is(cowslip_read(image, 0, NULL, 1, &error), COWSLIP_ERROR_INVALID));
    CHECK(cowslip_read(image, 0, NULL, 0, &error) == 0);
    CHECK(is(cowslip_read(image, cowslip_size(image), &extent, 1, &error), COWSLIP_ERROR_IO));
    CHECK(is(cowslip_request_run(image, &request, &error), COWSLIP_ERROR_INVALID));
    CHECK(is(cowslip_next_extent(image, 1ull << 60, &extent, &error), COWSLIP_ERROR_INVALID));
    CHECK(is(cowslip_resize(image, 1, &error), COWSLIP_ERROR_INVALID));
    CHECK(is(cowslip_write_zeroes(image, 0, 512, 64, &error), COWSLIP_ERROR_INVALID));
    /* A caller of a later version, whose new fields are not used, or are. */
    memset(later, 0, sizeof later);
    later[0].size = sizeof later;
    later[0].flags = 1 << 20;
    CHECK(is(cowslip_open("x", later, &other, &error), COWSLIP_ERROR_INVALID));
    later[0].flags = 0;
    later[1].flags = 1;
    CHECK(is(cowslip_open("x", later, &other, &error), COWSLIP_ERROR_INVALID));
    later[0].size = 0;
    CHECK(is(cowslip_open("x", later, &other, &error), COWSLIP_ERROR_INVALID));
    CHECK(cowslip_size(NULL) == 0 && cowslip_queue_fd(NULL) == -1 && !cowslip_error_message(NULL));
    cowslip_error_free(NULL);
    cowslip_job_cancel(NULL);
    cowslip_queue_free(NULL);
    CHECK(cowslip_close(NULL, &error) == 0);
}

int main(int argc, char **argv)
{
    cowslip_create_options base = { .size = sizeof base, .disk_size = 1 << 20 };
    cowslip_create_options top = {
        .size = sizeof top,
        .flags = COWSLIP_CREATE_EXTENDED_L2,
        .backing_file = "base.qcow2",
        .backing_format = "qcow2",
    };
    cowslip_open_options options = {
        .size = sizeof options,
        .flags = COWSLIP_OPEN_WRITABLE,
        .format = "qcow2",
        .open_file = open_file,
        .user = &asked,
    };
    cowslip_check_result result;
    cowslip_image *image = NULL;
    cowslip_extent extent;

    (void)argc, (void)argv;
    CHECK(cowslip_create("base.qcow2", &base, NULL, &error) == 0);
    CHECK(is(cowslip_create("base.qcow2", &base, NULL, &error), COWSLIP_ERROR_IO));
    CHECK(cowslip_create("top.qcow2", &top, NULL, &error) == 0);
    setenv("REFUSE", "1", 1);
    CHECK(cowslip_open("top.qcow2", &options, &image, &error) < 0 && !image);
    CHECK(strstr(cowslip_error_message(error), "ermission denied"));
    cowslip_error_free(error);
    error = NULL;
    unsetenv("REFUSE");
    CHECK(asked == 2);
    CHECK(cowslip_open("top.qcow2", &options, &image, &error) == 0 && asked == 4);
    CHECK(cowslip_layer_count(image) == 2 && cowslip_is_writable(image));
    CHECK(strstr(cowslip_layer_name(image, 1), "base") && !cowslip_layer_name(image, 2));
    CHECK(strcmp(cowslip_layer_format(image, 0), "qcow2") == 0);
    CHECK(cowslip_size(image) == 1 << 20 && cowslip_block_size(image) == 2048);
    nonsense(image);
    threads(image);
    snapshots(image);
    CHECK(cowslip_next_extent(image, 0, &extent, &error) == 0);
    CHECK(extent.flags & COWSLIP_EXTENT_DATA && extent.depth == 0 && extent.length >= 512);
    CHECK(cowslip_write_zeroes(image, 0, 65536, COWSLIP_MAY_UNMAP, &error) == 0);
    CHECK(cowslip_next_extent(image, 0, &extent, &error) == 0);
    CHECK(extent.flags & COWSLIP_EXTENT_ZERO);
    CHECK(cowslip_resize(image, 8 << 20, &error) == 0 && cowslip_size(image) == 8 << 20);
    CHECK(cowslip_close(image, &error) == 0);
    CHECK(cowslip_check("top.qcow2", NULL, NULL, &result, &error) == 0);
    CHECK(result.corruptions == 0 && result.leaks == 0 && result.errors == 0);
    return 0;
}
