/* nbdkit ./cowslip.so file=IMAGE: any image that Cowslip opens, served by nbdkit. */
#define NBDKIT_API_VERSION 2
#include <cowslip.h>
#include <errno.h>
#include <nbdkit-plugin.h>
#include <string.h>

#define THREAD_MODEL NBDKIT_THREAD_MODEL_PARALLEL

static const char *file;
static cowslip_image *image;

/* Passes an error on to nbdkit, and so to the client. */
static int failed(cowslip_error *error)
{
    nbdkit_error("%s", cowslip_error_message(error));
    nbdkit_set_error(cowslip_error_errno(error));
    cowslip_error_free(error);
    return -1;
}

static int config(const char *key, const char *value)
{
    if (strcmp(key, "file") != 0) {
        nbdkit_error("unknown parameter '%s'", key);
        return -1;
    }
    file = value;
    return 0;
}

/* The image belongs to the process, not to a connection: several share it. */
static int after_fork(void)
{
    cowslip_error *error = NULL;
    cowslip_open_options options = {
        .size = sizeof options,
        .flags = COWSLIP_OPEN_WRITABLE | COWSLIP_OPEN_DISCARD,
    };

    return cowslip_open(file, &options, &image, &error) ? failed(error) : 0;
}

static void cleanup(void)
{
    cowslip_error *error = NULL;

    if (cowslip_close(image, &error) != 0)
        failed(error);
}

static void *open_connection(int readonly)
{
    (void)readonly;
    return NBDKIT_HANDLE_NOT_NEEDED;
}

static int64_t get_size(void *handle)
{
    (void)handle;
    return (int64_t)cowslip_size(image);
}

static int can(void *handle)
{
    (void)handle;
    return 1;
}

static int can_fua(void *handle)
{
    (void)handle;
    return NBDKIT_FUA_NATIVE;
}

/* A request with the flags of nbdkit. */
static int request(uint32_t operation, uint32_t flags, uint64_t offset, struct iovec iov)
{
    cowslip_error *error = NULL;
    cowslip_request request = {
        .operation = operation,
        .flags = flags,
        .offset = offset,
        .length = iov.iov_len,
        .iov = &iov,
        .iov_count = 1,
    };

    return cowslip_request_run(image, &request, &error) ? failed(error) : 0;
}

static int pread_disk(void *handle, void *buffer, uint32_t count, uint64_t offset, uint32_t flags)
{
    (void)handle, (void)flags;
    return request(COWSLIP_READ, 0, offset, (struct iovec){ buffer, count });
}

static int pwrite_disk(void *handle, const void *buffer, uint32_t count, uint64_t offset,
                       uint32_t flags)
{
    uint32_t ours = flags & NBDKIT_FLAG_FUA ? COWSLIP_FUA : 0;

    (void)handle;
    return request(COWSLIP_WRITE, ours, offset, (struct iovec){ (void *)buffer, count });
}

static int zero(void *handle, uint32_t count, uint64_t offset, uint32_t flags)
{
    uint32_t ours = flags & NBDKIT_FLAG_FUA ? COWSLIP_FUA : 0;

    (void)handle;
    ours |= flags & NBDKIT_FLAG_MAY_TRIM ? COWSLIP_MAY_UNMAP : 0;
    return request(COWSLIP_ZERO, ours, offset, (struct iovec){ NULL, count });
}

static int trim(void *handle, uint32_t count, uint64_t offset, uint32_t flags)
{
    cowslip_error *error = NULL;

    (void)handle;
    if (cowslip_discard(image, offset, count, &error) != 0)
        return failed(error);
    if (flags & NBDKIT_FLAG_FUA && cowslip_flush(image, &error) != 0)
        return failed(error);
    return 0;
}

static int flush(void *handle, uint32_t flags)
{
    cowslip_error *error = NULL;

    (void)handle, (void)flags;
    return cowslip_flush(image, &error) ? failed(error) : 0;
}

static int extents(void *handle, uint32_t count, uint64_t offset, uint32_t flags,
                   struct nbdkit_extents *extents)
{
    cowslip_error *error = NULL;
    cowslip_extent extent;
    uint64_t at = offset, end = offset + count;

    (void)handle;
    while (at < end) {
        if (cowslip_next_extent(image, at, &extent, &error) != 0)
            return failed(error);
        uint32_t type = extent.flags & COWSLIP_EXTENT_ZERO ? NBDKIT_EXTENT_ZERO : 0;
        type |= extent.flags & COWSLIP_EXTENT_PRESENT ? 0 : NBDKIT_EXTENT_HOLE;
        if (nbdkit_add_extent(extents, at, extent.length, type) == -1)
            return -1;
        if (flags & NBDKIT_FLAG_REQ_ONE)
            break;
        at += extent.length;
    }
    return 0;
}

static struct nbdkit_plugin plugin = {
    .name = "cowslip",
    .version = "0.1.0",
    .config = config,
    .magic_config_key = "file",
    .after_fork = after_fork,
    .cleanup = cleanup,
    .open = open_connection,
    .get_size = get_size,
    .can_multi_conn = can,
    .can_extents = can,
    .can_fua = can_fua,
    .pread = pread_disk,
    .pwrite = pwrite_disk,
    .zero = zero,
    .trim = trim,
    .flush = flush,
    .extents = extents,
};

NBDKIT_REGISTER_PLUGIN(plugin)
