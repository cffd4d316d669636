/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * libcowslip: a qcow2 storage engine that allocates well.
 *
 * Return values. A function that can fail returns 0, or a negative errno. It takes a place for an
 * error, which may be NULL; an error that is put there belongs to the caller, who frees it with
 * cowslip_error_free. Nothing is put there after success. Handles that are NULL, and strings that
 * are not UTF-8, are errors (COWSLIP_ERROR_INVALID), not crashes.
 *
 * Threads. A handle may be used by several threads at a time, but for the call that frees it.
 * Calls block; calls of several threads run side by side, on one image too. Each thread that makes
 * one gets an I/O queue of its own (io_uring where the kernel has it), until it ends.
 *
 * Descriptions (..._options) begin with their size: set it to sizeof. All zeroes behind it are the
 * defaults, and later versions add fields at the end.
 *
 * A process that forks may use in the child only what it opens there.
 */
#ifndef COWSLIP_H
#define COWSLIP_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of the library that is loaded, such as "0.1.0". */
const char *cowslip_version(void);

/* ---- Errors ---- */

typedef struct cowslip_error cowslip_error;

#define COWSLIP_ERROR_IO 1          /* the system failed */
#define COWSLIP_ERROR_CORRUPT 2     /* the image contradicts itself or the format */
#define COWSLIP_ERROR_UNSUPPORTED 3 /* something is needed that is not there */
#define COWSLIP_ERROR_OPENING 4     /* an image, or a file that it names, could not be opened */
#define COWSLIP_ERROR_INVALID 5     /* the call makes no sense */
#define COWSLIP_ERROR_READ_ONLY 6   /* a write to what is open for reading */
#define COWSLIP_ERROR_LATCHED 7     /* after a failed flush: writes fail until it is opened again */
#define COWSLIP_ERROR_FORBIDDEN 8   /* the policy on files that images name */
#define COWSLIP_ERROR_KEY 9         /* a passphrase is missing or wrong */
#define COWSLIP_ERROR_LOCKED 10     /* another process uses the file */
#define COWSLIP_ERROR_OVERWRITES 11 /* a write would change a file that is read */
#define COWSLIP_ERROR_CANCELLED 12  /* the job was cancelled */
#define COWSLIP_ERROR_PANIC 100     /* a mistake of the library; the image is to be closed */

int cowslip_error_kind(const cowslip_error *error);          /* 0 for NULL */
int cowslip_error_errno(const cowslip_error *error);         /* positive; 0 for NULL */
const char *cowslip_error_message(const cowslip_error *error); /* until it is freed */
void cowslip_error_free(cowslip_error *error);

/* ---- Long operations ---- */

typedef struct cowslip_job cowslip_job;

typedef struct cowslip_progress {
    uint64_t done_bytes;
    uint64_t total_bytes; /* as far as known */
} cowslip_progress;

/*
 * Is called after each piece of work, by the thread that has called the operation. It may call
 * cowslip_job_cancel and the functions for errors, and no others.
 */
typedef void cowslip_report(void *user, const cowslip_progress *progress);

/* A job is for one operation. `report` may be NULL. */
int cowslip_job_new(cowslip_report *report, void *user, cowslip_job **job, cowslip_error **error);
/* From any thread. The operation fails with COWSLIP_ERROR_CANCELLED, if it has not ended. */
void cowslip_job_cancel(const cowslip_job *job);
cowslip_progress cowslip_job_get(const cowslip_job *job); /* from any thread */
void cowslip_job_free(cowslip_job *job);

/* ---- Images ---- */

typedef struct cowslip_image cowslip_image;

#define COWSLIP_OPEN_WRITABLE 1
#define COWSLIP_OPEN_DIRECT 2       /* past the page cache (O_DIRECT) */
#define COWSLIP_OPEN_UNSAFE 4       /* flushes do nothing: all is lost with the host */
#define COWSLIP_OPEN_WRITETHROUGH 8 /* each write is durable when it completes */
#define COWSLIP_OPEN_DISCARD 16     /* discards release space; else they do nothing */
#define COWSLIP_OPEN_FORCE_SHARE 32 /* read it although another process writes it */

#define COWSLIP_BACKING_ANY 0            /* images may name any file */
#define COWSLIP_BACKING_SAME_DIRECTORY 1 /* files in or below their own directory */
#define COWSLIP_BACKING_NONE 2           /* none: for images of strangers */

typedef struct cowslip_naming {
    const char *name; /* relative names of images are resolved already; valid during the call */
    int writable;     /* open it for reading and writing */
    int by_image;     /* the name stands in an image, which may be untrusted */
} cowslip_naming;

/*
 * Opens a file for the library, which closes the descriptor, or returns a negative errno. It may be
 * called by any thread that opens an image, and must not call the library.
 */
typedef int cowslip_open_file(void *user, const cowslip_naming *naming);

typedef struct cowslip_open_options {
    uint32_t size;
    uint32_t flags;                /* COWSLIP_OPEN_... */
    uint32_t backing;              /* COWSLIP_BACKING_... */
    uint32_t reserved;
    const char *format;            /* "qcow2", "raw", ...; NULL finds it out: a guest of a raw disk
                                      may write what looks like another format, so name it */
    const char *passphrase;        /* of an encrypted image, or NULL */
    cowslip_open_file *open_file;  /* opens the image and all that it names, or NULL */
    void *user;                    /* its first argument; it must live as long as the image */
} cowslip_open_options;

/* Opens an image: a path, nbd://host/export, json:{...} or another name that the command takes. */
int cowslip_open(const char *name, const cowslip_open_options *options, cowslip_image **image,
                 cowslip_error **error);
/*
 * Opens the image in an open file; `name` is for messages, and for names in the image. The
 * descriptor is duplicated; O_DIRECT is set for both, or cleared, as the options have it.
 */
int cowslip_open_fd(int fd, const char *name, const cowslip_open_options *options,
                    cowslip_image **image, cowslip_error **error);

#define COWSLIP_CREATE_EXTENDED_L2 1 /* subclusters */
#define COWSLIP_CREATE_REPLACE 2     /* an existing file is replaced; else it is an error */
#define COWSLIP_CREATE_PREALLOCATE 4 /* space for all of the disk, now */

typedef struct cowslip_create_options {
    uint32_t size;
    uint32_t flags;             /* COWSLIP_CREATE_... */
    uint64_t disk_size;         /* in bytes; 0 with a backing file: as large as that one's disk */
    uint64_t cluster_size;      /* in bytes; 0 is 65536 */
    const char *format;         /* "qcow2" or "raw"; NULL is qcow2 */
    const char *backing_file;   /* as it stands in the image, or NULL */
    const char *backing_format; /* goes with it */
} cowslip_create_options;

/* Makes an image; `job` may be NULL. */
int cowslip_create(const char *name, const cowslip_create_options *options, const cowslip_job *job,
                   cowslip_error **error);

/* Flushes, closes and frees an image, whatever the outcome. Its queues are freed before. */
int cowslip_close(cowslip_image *image, cowslip_error **error);

uint64_t cowslip_size(const cowslip_image *image);       /* bytes of the disk */
uint64_t cowslip_block_size(const cowslip_image *image); /* unit of allocation in bytes */
int cowslip_is_writable(const cowslip_image *image);
size_t cowslip_layer_count(const cowslip_image *image);  /* images of the chain, itself included */
/* Until the image is closed; NULL if there is no such layer. Layer 0 is the image itself. */
const char *cowslip_layer_name(const cowslip_image *image, size_t depth);
const char *cowslip_layer_format(const cowslip_image *image, size_t depth);
/* Makes the disk larger. */
int cowslip_resize(const cowslip_image *image, uint64_t size, cowslip_error **error);

/* ---- Requests that block ---- */

int cowslip_read(const cowslip_image *image, uint64_t offset, void *buffer, size_t length,
                 cowslip_error **error);
int cowslip_write(const cowslip_image *image, uint64_t offset, const void *buffer, size_t length,
                  cowslip_error **error);
/* Makes durable all that had completed when it was called. */
int cowslip_flush(const cowslip_image *image, cowslip_error **error);
/* Does nothing without COWSLIP_OPEN_DISCARD. */
int cowslip_discard(const cowslip_image *image, uint64_t offset, uint64_t length,
                    cowslip_error **error);
/* `flags`: COWSLIP_FUA, COWSLIP_MAY_UNMAP. */
int cowslip_write_zeroes(const cowslip_image *image, uint64_t offset, uint64_t length,
                         uint32_t flags, cowslip_error **error);

#define COWSLIP_EXTENT_DATA 1       /* stored as data */
#define COWSLIP_EXTENT_ZERO 2       /* reads as zeroes */
#define COWSLIP_EXTENT_PRESENT 4    /* some layer has it */
#define COWSLIP_EXTENT_COMPRESSED 8
#define COWSLIP_EXTENT_MAPPED 16    /* host_offset is set */

typedef struct cowslip_extent {
    uint64_t start;
    uint64_t length;      /* never 0 */
    uint64_t host_offset; /* in the layer's file */
    uint32_t flags;       /* COWSLIP_EXTENT_... */
    uint32_t depth;       /* the layer that has it */
} cowslip_extent;

/* The run of one state that begins at `offset`. */
int cowslip_next_extent(const cowslip_image *image, uint64_t offset, cowslip_extent *extent,
                        cowslip_error **error);

/* ---- Requests of an event loop ---- */

#define COWSLIP_READ 1
#define COWSLIP_WRITE 2
#define COWSLIP_FLUSH 3
#define COWSLIP_DISCARD 4
#define COWSLIP_ZERO 5

#define COWSLIP_FUA 1       /* durable when it completes: writes, zeroes */
#define COWSLIP_MAY_UNMAP 2 /* zeroes may release space */

/*
 * The memory of a request may be a guest's. It stays mapped until the request has completed, and is
 * not copied where direct I/O takes its address; for bytes that others change meanwhile, each that
 * is written is one that was there at some moment. A read changes its memory alone; where a piece
 * does not begin or end at a word (8 bytes), the rest of that word must not change meanwhile by
 * plain stores of several bytes.
 */
typedef struct cowslip_request {
    uint32_t operation;      /* COWSLIP_READ and others */
    uint32_t flags;          /* COWSLIP_FUA, COWSLIP_MAY_UNMAP */
    uint64_t offset;         /* on the disk, in bytes */
    uint64_t length;         /* of COWSLIP_DISCARD and COWSLIP_ZERO */
    const struct iovec *iov; /* of COWSLIP_READ and COWSLIP_WRITE; the array may go at once */
    size_t iov_count;
    uint64_t cookie;         /* the caller's name for it */
} cowslip_request;

typedef struct cowslip_completion {
    uint64_t cookie;
    int32_t result; /* 0 or a negative errno */
    uint32_t reserved;
} cowslip_completion;

/* Carries out one request and waits for it. */
int cowslip_request_run(const cowslip_image *image, const cowslip_request *request,
                        cowslip_error **error);

typedef struct cowslip_queue cowslip_queue;

/* A queue of requests, with a thread of its own that carries them out. */
int cowslip_queue_new(const cowslip_image *image, cowslip_queue **queue, cowslip_error **error);
/*
 * An eventfd, of the queue, that is readable when there may be completions. Read its 8 bytes, then
 * take completions.
 */
int cowslip_queue_fd(const cowslip_queue *queue);
/* Submits all of the requests, or after an error none. Does not block. */
int cowslip_queue_submit(const cowslip_queue *queue, const cowslip_request *requests, size_t count,
                         cowslip_error **error);
/* Takes `max` completions at most; their number. Does not block. */
size_t cowslip_queue_complete(const cowslip_queue *queue, cowslip_completion *completions,
                              size_t max);
/* Waits until no request is under way. Completions that were not taken are lost. */
void cowslip_queue_free(cowslip_queue *queue);

/* ---- Snapshots within an image ---- */

typedef struct cowslip_snapshots cowslip_snapshots;

int cowslip_snapshot_create(const cowslip_image *image, const char *name, const cowslip_job *job,
                            cowslip_error **error);
int cowslip_snapshot_apply(const cowslip_image *image, const char *id_or_name,
                           const cowslip_job *job, cowslip_error **error);
int cowslip_snapshot_delete(const cowslip_image *image, const char *id_or_name,
                            const cowslip_job *job, cowslip_error **error);
int cowslip_snapshot_list(const cowslip_image *image, cowslip_snapshots **list,
                          cowslip_error **error);
size_t cowslip_snapshots_count(const cowslip_snapshots *list);
/* Until the list is freed; NULL if there is no such entry. */
const char *cowslip_snapshot_id(const cowslip_snapshots *list, size_t index);
const char *cowslip_snapshot_name(const cowslip_snapshots *list, size_t index);
void cowslip_snapshots_free(cowslip_snapshots *list);

/* ---- Whole images ---- */

typedef struct cowslip_check_result {
    uint64_t corruptions;
    uint64_t leaks;  /* clusters that are counted, and not used: they cost space alone */
    uint64_t errors; /* what could not be checked */
    uint64_t allocated_clusters;
    uint64_t total_clusters;
} cowslip_check_result;

/* Checks an image's structures; changes nothing. */
int cowslip_check(const char *name, const cowslip_open_options *options, const cowslip_job *job,
                  cowslip_check_result *result, cowslip_error **error);

#define COWSLIP_CONVERT_COMPRESSED 1
#define COWSLIP_CONVERT_TARGET_IS_ZERO 2 /* the target is new: holes need not be written */

/* Copies the source's disk to the target, which is at least as long, and flushes. */
int cowslip_convert(const cowslip_image *source, const cowslip_image *target, uint32_t flags,
                    const cowslip_job *job, cowslip_error **error);

#ifdef __cplusplus
}
#endif

#endif
