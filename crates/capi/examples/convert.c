/* convert SOURCE TARGET: copies a disk into a new qcow2 image, with progress, until interrupted. */
#include <cowslip.h>
#include <signal.h>
#include <stdio.h>

static cowslip_job *job;

static void interrupted(int signal)
{
    (void)signal;
    cowslip_job_cancel(job);
}

static void report(void *user, const cowslip_progress *progress)
{
    (void)user;
    fprintf(stderr, "\r%llu of %llu MiB", (unsigned long long)progress->done_bytes >> 20,
            (unsigned long long)progress->total_bytes >> 20);
}

static int failed(const char *what, cowslip_error *error)
{
    fprintf(stderr, "%s: %s\n", what, cowslip_error_message(error));
    cowslip_error_free(error);
    return 1;
}

int main(int argc, char **argv)
{
    cowslip_error *error = NULL;
    cowslip_image *source = NULL, *target = NULL;
    int status = 0;

    if (argc != 3) {
        fprintf(stderr, "usage: %s SOURCE TARGET\n", argv[0]);
        return 2;
    }
    if (cowslip_open(argv[1], NULL, &source, &error) != 0)
        return failed("open", error);
    cowslip_create_options made = {
        .size = sizeof made,
        .disk_size = cowslip_size(source),
    };
    cowslip_open_options writable = {
        .size = sizeof writable,
        .flags = COWSLIP_OPEN_WRITABLE,
        .format = "qcow2",
    };
    if (cowslip_job_new(report, NULL, &job, &error) != 0)
        status = failed("job", error);
    else if (cowslip_create(argv[2], &made, NULL, &error) != 0)
        status = failed("create", error);
    else if (cowslip_open(argv[2], &writable, &target, &error) != 0)
        status = failed("open", error);
    else {
        signal(SIGINT, interrupted);
        if (cowslip_convert(source, target, COWSLIP_CONVERT_TARGET_IS_ZERO, job, &error) != 0)
            status = failed("\nconvert", error);
    }
    if (cowslip_close(target, &error) != 0)
        status = failed("close", error);
    if (cowslip_close(source, &error) != 0)
        status = failed("close", error);
    cowslip_job_free(job);
    return status;
}
