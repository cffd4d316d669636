/* Ceph's librados and librbd over plain files, for tests: one library under both names.
 *
 * Beside it, in its directory: `pools/POOL/[NAMESPACE/]IMAGE` and `IMAGE@SNAPSHOT` are images;
 * `log` gets a line for each call; `faults` has lines `CALL NUMBER ERRNO`: the call of this name
 * and number in the process fails (`ended` is the end of a request); while `hold` exists, requests
 * do not end; while `deaf` exists, the cluster is not connected to. `ceph.conf` is the usual file
 * of settings, of which `mon_host` alone is read. `overlap` and `stripes` have numbers.
 *
 * What the real libraries forbid ends the process: handles that are not open, ranges beyond the
 * end, an image closed while its requests are under way, a difference that does not begin at an
 * object, which versions before 17 answer wrongly.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OBJECT_BITS = 16, OBJECT = 1 << OBJECT_BITS };
enum { CLUSTER = 0x1111, POOL, IMAGE, COMPLETION };

typedef void (*callback)(void *completion, void *argument);

struct cluster { int magic; int connected; atomic_int pools; char mon_host[256]; };
struct pool { int magic; struct cluster *cluster; atomic_int images; char path[PATH_MAX]; };
struct image {
	int magic, fd, writable;
	struct pool *pool;
	atomic_int under_way;
	char path[PATH_MAX];
};
struct completion { int magic; callback ended; void *argument; ssize_t answer; int is_over; };
struct request {
	char kind;
	struct image *image;
	uint64_t offset, len;
	char *memory;
	struct completion *completion;
};
struct info {
	uint64_t size, obj_size, num_objs;
	int order;
	char block_name_prefix[24];
	int64_t parent_pool;
	char parent_name[96];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static const char *here(void)
{
	static char directory[PATH_MAX];
	pthread_mutex_lock(&lock);
	if (!directory[0]) {
		Dl_info info;
		char path[PATH_MAX];
		dladdr((void *)here, &info);
		snprintf(path, sizeof path, "%s", info.dli_fname);
		snprintf(directory, sizeof directory, "%s", dirname(path));
	}
	pthread_mutex_unlock(&lock);
	return directory;
}

static void beside(char *path, const char *name)
{
	if (snprintf(path, PATH_MAX, "%s/%s", here(), name) >= PATH_MAX)
		abort();
}

static int exists(const char *name)
{
	char path[PATH_MAX];
	beside(path, name);
	return access(path, F_OK) == 0;
}

static uint64_t number(const char *name, uint64_t otherwise)
{
	char path[PATH_MAX];
	unsigned long long found = otherwise;
	beside(path, name);
	FILE *file = fopen(path, "re");
	if (file) {
		if (fscanf(file, "%llu", &found) != 1)
			abort();
		fclose(file);
	}
	return found;
}

static void note(const char *format, ...)
{
	char path[PATH_MAX], line[PATH_MAX];
	va_list arguments;
	va_start(arguments, format);
	int len = vsnprintf(line, sizeof line - 1, format, arguments);
	va_end(arguments);
	if (len > (int)sizeof line - 2)
		len = sizeof line - 2;
	line[len] = '\n';
	beside(path, "log");
	int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
	if (fd < 0 || write(fd, line, len + 1) != len + 1)
		abort();
	close(fd);
}

static void must(int holds, const char *what)
{
	if (holds)
		return;
	note("FORBIDDEN %s", what);
	fprintf(stderr, "fake Ceph: forbidden: %s\n", what);
	abort();
}

/* The error that this call is to have, negative; 0 if none. */
static int fault(const char *call)
{
	static struct { char name[64]; int count; } counts[64];
	char path[PATH_MAX], name[64];
	int which, error, found = 0, slot = 0;
	pthread_mutex_lock(&lock);
	while (slot < 63 && counts[slot].name[0] && strcmp(counts[slot].name, call))
		slot++;
	snprintf(counts[slot].name, sizeof counts[slot].name, "%s", call);
	int count = ++counts[slot].count;
	pthread_mutex_unlock(&lock);
	beside(path, "faults");
	FILE *file = fopen(path, "re");
	if (!file)
		return 0;
	while (fscanf(file, "%63s %d %d", name, &which, &error) == 3)
		if (!strcmp(name, call) && which == count)
			found = -error;
	fclose(file);
	return found;
}

static struct cluster *cluster_of(void *handle)
{
	struct cluster *cluster = handle;
	must(cluster && cluster->magic == CLUSTER, "a cluster that is not open");
	return cluster;
}

static struct pool *pool_of(void *handle)
{
	struct pool *pool = handle;
	must(pool && pool->magic == POOL, "a pool that is not open");
	return pool;
}

static struct image *image_of(void *handle)
{
	struct image *image = handle;
	must(image && image->magic == IMAGE, "an image that is not open");
	return image;
}

static uint64_t bytes_of(struct image *image)
{
	struct stat found;
	must(fstat(image->fd, &found) == 0, "an image without a file");
	return found.st_size;
}

int rados_create(void **handle, const char *user)
{
	sigset_t mask;
	pthread_sigmask(SIG_SETMASK, NULL, &mask);
	must(sigismember(&mask, SIGTERM), "threads that take signals");
	note("rados_create %s", user ? user : "admin");
	int error = fault("rados_create");
	if (error)
		return error;
	struct cluster *cluster = calloc(1, sizeof *cluster);
	cluster->magic = CLUSTER;
	*handle = cluster;
	return 0;
}

int rados_conf_read_file(void *handle, const char *path)
{
	char usual[PATH_MAX], line[1024];
	struct cluster *cluster = cluster_of(handle);
	beside(usual, "ceph.conf");
	FILE *file = fopen(path ? path : usual, "re");
	note("rados_conf_read_file %s", path ? path : "usual");
	if (!file)
		return -errno;
	while (fgets(line, sizeof line, file))
		sscanf(line, " mon_host = %255s", cluster->mon_host);
	fclose(file);
	return 0;
}

int rados_conf_parse_env(void *handle, const char *variable)
{
	cluster_of(handle);
	must(!variable, "another variable than the usual one");
	return 0;
}

int rados_conf_set(void *handle, const char *name, const char *value)
{
	struct cluster *cluster = cluster_of(handle);
	note("rados_conf_set %s=%s", name, value);
	if (!strcmp(name, "mon_host"))
		snprintf(cluster->mon_host, sizeof cluster->mon_host, "%s", value);
	return strcmp(name, "unknown") ? 0 : -ENOENT;
}

int rados_connect(void *handle)
{
	struct cluster *cluster = cluster_of(handle);
	note("rados_connect %s", cluster->mon_host);
	while (exists("deaf"))
		usleep(1000);
	int error = fault("rados_connect");
	if (error || !cluster->mon_host[0])
		return error ? error : -ENOENT;
	cluster->connected = 1;
	return 0;
}

void rados_shutdown(void *handle)
{
	struct cluster *cluster = cluster_of(handle);
	must(cluster->pools == 0, "a cluster left with its pools open");
	note("rados_shutdown");
	cluster->magic = 0;
	free(cluster);
}

int rados_ioctx_create(void *handle, const char *name, void **io)
{
	struct cluster *cluster = cluster_of(handle);
	struct stat found;
	must(cluster->connected, "a pool of a cluster without a connection");
	note("rados_ioctx_create %s", name);
	struct pool *pool = calloc(1, sizeof *pool);
	beside(pool->path, "pools/");
	strncat(pool->path, name, sizeof pool->path - strlen(pool->path) - 1);
	if (stat(pool->path, &found) != 0) {
		free(pool);
		return -ENOENT;
	}
	cluster->pools++;
	pool->magic = POOL;
	pool->cluster = cluster;
	*io = pool;
	return 0;
}

void rados_ioctx_set_namespace(void *io, const char *name)
{
	struct pool *pool = pool_of(io);
	strncat(pool->path, "/", sizeof pool->path - strlen(pool->path) - 1);
	strncat(pool->path, name, sizeof pool->path - strlen(pool->path) - 1);
}

void rados_ioctx_destroy(void *io)
{
	struct pool *pool = pool_of(io);
	must(pool->images == 0, "a pool left with its images open");
	pool->cluster->pools--;
	pool->magic = 0;
	free(pool);
}

static void path_of(char *path, struct pool *pool, const char *name)
{
	must(snprintf(path, PATH_MAX, "%s/%s", pool->path, name) < PATH_MAX, "so long a name");
}

int rbd_create(void *io, const char *name, uint64_t size, int *order)
{
	char path[PATH_MAX];
	note("rbd_create %s %llu %d", name, (unsigned long long)size, *order);
	int error = fault("rbd_create");
	if (error)
		return error;
	path_of(path, pool_of(io), name);
	int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
	if (fd < 0 || ftruncate(fd, size) != 0)
		return -errno;
	close(fd);
	*order = OBJECT_BITS;
	return 0;
}

static int open_image(void *io, const char *name, void **handle, const char *snapshot, int writable)
{
	struct pool *pool = pool_of(io);
	must(!snapshot, "a snapshot at opening, whose absence is not told from the image's");
	note("rbd_open %s %s", name, writable ? "rw" : "ro");
	int error = fault("rbd_open");
	if (error)
		return error;
	struct image *image = calloc(1, sizeof *image);
	path_of(image->path, pool, name);
	image->fd = open(image->path, (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC);
	if (image->fd < 0) {
		error = -errno;
		free(image);
		return error;
	}
	image->magic = IMAGE;
	image->writable = writable;
	image->pool = pool;
	pool->images++;
	*handle = image;
	return 0;
}

int rbd_open(void *io, const char *name, void **image, const char *snapshot)
{
	return open_image(io, name, image, snapshot, 1);
}

int rbd_open_read_only(void *io, const char *name, void **image, const char *snapshot)
{
	return open_image(io, name, image, snapshot, 0);
}

int rbd_snap_set(void *handle, const char *name)
{
	struct image *image = image_of(handle);
	must(strlen(image->path) + strlen(name) + 2 < PATH_MAX, "so long a name");
	strcat(strcat(image->path, "@"), name);
	int fd = open(image->path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	close(image->fd);
	image->fd = fd;
	image->writable = 0;
	return 0;
}

int rbd_close(void *handle)
{
	struct image *image = image_of(handle);
	must(image->under_way == 0, "an image closed while requests are under way");
	note("rbd_close %s", basename(image->path));
	image->magic = 0;
	image->pool->images--;
	close(image->fd);
	free(image);
	return 0;
}

int rbd_stat(void *handle, struct info *info, size_t size)
{
	struct image *image = image_of(handle);
	must(size == sizeof *info, "another length of rbd_image_info_t");
	memset(info, 0, size);
	info->size = bytes_of(image);
	info->obj_size = OBJECT;
	info->num_objs = (info->size + OBJECT - 1) / OBJECT;
	info->order = OBJECT_BITS;
	return fault("rbd_stat");
}

int rbd_get_stripe_count(void *handle, uint64_t *count)
{
	image_of(handle);
	*count = number("stripes", 1);
	return 0;
}

int rbd_get_overlap(void *handle, uint64_t *bytes)
{
	image_of(handle);
	*bytes = number("overlap", 0);
	return 0;
}

int rbd_resize(void *handle, uint64_t bytes)
{
	struct image *image = image_of(handle);
	note("rbd_resize %llu", (unsigned long long)bytes);
	int error = fault("rbd_resize");
	if (error || !image->writable)
		return error ? error : -EROFS;
	return ftruncate(image->fd, bytes) == 0 ? 0 : -errno;
}

int rbd_diff_iterate2(void *handle, const char *from, uint64_t offset, uint64_t len,
		      uint8_t with_parent, uint8_t whole_objects,
		      int (*found)(uint64_t, size_t, int, void *), void *argument)
{
	struct image *image = image_of(handle);
	uint64_t bytes = bytes_of(image), end = offset + len;
	note("rbd_diff_iterate2 %llu %llu", (unsigned long long)offset, (unsigned long long)len);
	must(!from && with_parent && whole_objects, "another difference than from the beginning");
	must(offset % (OBJECT * number("stripes", 1)) == 0, "a difference from within an object");
	must(end <= bytes, "a difference beyond the end");
	int error = fault("rbd_diff_iterate2");
	if (error)
		return error;
	for (; offset < end; offset += OBJECT) {
		off_t data = lseek(image->fd, offset, SEEK_DATA);
		uint64_t next = offset + OBJECT < end ? offset + OBJECT : end;
		if (data < 0 || (uint64_t)data >= next)
			continue;
		int answer = found(offset, next - offset, 1, argument);
		if (answer < 0)
			return answer;
	}
	return 0;
}

int rbd_aio_create_completion(void *argument, callback ended, void **handle)
{
	int error = fault("rbd_aio_create_completion");
	if (error)
		return error;
	struct completion *completion = calloc(1, sizeof *completion);
	completion->magic = COMPLETION;
	completion->ended = ended;
	completion->argument = argument;
	*handle = completion;
	return 0;
}

static struct completion *completion_of(void *handle)
{
	struct completion *completion = handle;
	must(completion && completion->magic == COMPLETION, "a completion that was released");
	return completion;
}

ssize_t rbd_aio_get_return_value(void *handle)
{
	struct completion *completion = completion_of(handle);
	must(completion->is_over, "the answer of a request that is under way");
	return completion->answer;
}

void rbd_aio_release(void *handle)
{
	struct completion *completion = completion_of(handle);
	completion->magic = 0;
	free(completion);
}

static ssize_t carry_out(struct request *request)
{
	int fd = request->image->fd;
	switch (request->kind) {
	case 'r':
		return pread(fd, request->memory, request->len, request->offset);
	case 'w':
		return pwrite(fd, request->memory, request->len, request->offset) < 0 ? -1 : 0;
	case 'd': /* Of parts of objects nothing is discarded. */
		request->len -= request->len % OBJECT;
		if (request->len == 0 || request->offset % OBJECT)
			return 0;
		/* fall through */
	case 'z':
		return fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, request->offset,
				 request->len);
	case 't':
		return fallocate(fd, FALLOC_FL_ZERO_RANGE, request->offset, request->len);
	default:
		return fdatasync(fd);
	}
}

static void *end_later(void *argument)
{
	struct request *request = argument;
	struct completion *completion = request->completion;
	while (exists("hold"))
		usleep(1000);
	ssize_t answer = fault("ended");
	if (!answer) {
		answer = carry_out(request);
		if (answer < 0)
			answer = -errno;
	}
	completion->answer = answer;
	completion->is_over = 1;
	request->image->under_way--;
	completion->ended(completion, completion->argument);
	free(request);
	return NULL;
}

static int begin(char kind, void *handle, uint64_t offset, uint64_t len, const char *memory,
		 void *completion)
{
	char name[] = "aio_?";
	struct image *image = image_of(handle);
	name[4] = kind;
	note("%s %llu %llu", name, (unsigned long long)offset, (unsigned long long)len);
	must(kind == 'f' || len > 0, "a request for nothing");
	must(offset + len <= bytes_of(image), "a request beyond the end");
	int error = fault(name);
	if (error)
		return error;
	if (!strchr("rf", kind) && !image->writable)
		return -EROFS;
	struct request *request = malloc(sizeof *request);
	*request = (struct request){ kind, image, offset, len, (char *)memory,
				     completion_of(completion) };
	pthread_t thread;
	image->under_way++;
	if (pthread_create(&thread, NULL, end_later, request))
		abort();
	pthread_detach(thread);
	return 0;
}

int rbd_aio_read(void *image, uint64_t offset, size_t len, char *to, void *completion)
{
	return begin('r', image, offset, len, to, completion);
}

int rbd_aio_write(void *image, uint64_t offset, size_t len, const char *from, void *completion)
{
	return begin('w', image, offset, len, from, completion);
}

int rbd_aio_discard(void *image, uint64_t offset, uint64_t len, void *completion)
{
	return begin('d', image, offset, len, NULL, completion);
}

int rbd_aio_flush(void *image, void *completion)
{
	return begin('f', image, 0, 0, NULL, completion);
}

#ifndef WITHOUT_WRITE_ZEROES
int rbd_aio_write_zeroes(void *image, uint64_t offset, size_t len, void *completion, int flags,
			 int hints)
{
	must(hints == 0 && (flags & ~1) == 0, "flags that are not known");
	return begin(flags ? 't' : 'z', image, offset, len, NULL, completion);
}
#endif
